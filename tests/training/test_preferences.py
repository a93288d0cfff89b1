"""DPO's losses and their gradients are those of NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxis.errors import ConfigError
from jaxis.training.config import TrainConfig
from jaxis.training.objectives import DPO
from jaxis.training.scores import Scores


class Pairs:
    """Three pairs of answers of up to five tokens, the last one padding."""

    num_sequences = jnp.asarray([1, 1, 0, 1, 1, 0])
    learned = jnp.asarray(np.arange(5) < np.array([5, 3, 0, 2, 4, 0])[:, None])


def log_sigmoid(x):
    return -np.log1p(np.exp(-x))


def numpy_losses(policy, reference, kind, beta, smoothing):
    changes = ((policy - reference) * np.asarray(Pairs.learned)).sum(-1)
    if kind == "ipo":
        means = changes / np.maximum(np.asarray(Pairs.learned).sum(-1), 1)
        return ((means[:2] - means[3:5]) - 1 / (2 * beta)) ** 2
    margin = beta * (changes[:2] - changes[3:5])
    if kind == "hinge":
        return np.maximum(0, 1 - margin)
    return -(1 - smoothing) * log_sigmoid(margin) - smoothing * log_sigmoid(-margin)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("kind", "smoothing"), [("sigmoid", 0.0), ("sigmoid", 0.1), ("hinge", 0.0), ("ipo", 0.0)])
def test_losses_gradients_and_rewards_are_those_of_numpy(kind, smoothing):
    beta = 0.3
    policy, reference = np.random.default_rng(0).normal(size=(2, 6, 5))
    objective = DPO(beta, smoothing, kind)

    def forward(values, batch, key):
        return Scores(jnp.where(Pairs.learned, values, 0.0), jnp.zeros(()), None, lambda positions: values)

    forward.fixed = forward

    def total(values):
        losses = objective.loss(forward, values, jnp.asarray(reference, jnp.float32), Pairs(), None)
        return losses.total, losses.reported.sums

    (loss, reported), gradient = jax.value_and_grad(total, has_aux=True)(jnp.asarray(policy, jnp.float32))
    np.testing.assert_allclose(loss, numpy_losses(policy, reference, kind, beta, smoothing).sum(), rtol=1e-5)
    expected, step = np.zeros_like(policy), 1e-6
    for place in np.ndindex(*policy.shape):
        ends = []
        for sign in (1, -1):
            moved = policy.copy()
            moved[place] += sign * step
            ends.append(numpy_losses(moved, reference, kind, beta, smoothing).sum())
        expected[place] = (ends[0] - ends[1]) / (2 * step)
    np.testing.assert_allclose(gradient, expected, atol=1e-5 * np.abs(expected).max())
    assert np.any(expected)

    changes = beta * ((policy - reference) * np.asarray(Pairs.learned)).sum(-1)
    np.testing.assert_allclose(reported["rewards/chosen"], changes[:2].sum(), rtol=1e-5)
    np.testing.assert_allclose(reported["rewards/margins"], (changes[:2] - changes[3:5]).sum(), rtol=1e-5)
    assert float(reported["rewards/accuracies"]) == (changes[:2] > changes[3:5]).sum()
    assert float(objective.weight(Pairs())) == 2


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        ({"loss_type": "sppo_hard"}, r"loss_type='sppo_hard' must be one of sigmoid, hinge, ipo"),
        (
            {"loss_type": "ipo", "label_smoothing": 0.1},
            r"label_smoothing=0\.1 cannot be honoured: it is of loss_type=sigmoid",
        ),
        ({"loss_type": "ipo", "beta": 0}, r"beta=0 cannot be honoured: give one above 0"),
    ],
)
def test_losses_that_there_are_not_are_refused_by_name(kwargs, named):
    training = {"trainer_type": "TRL_DPO", "trainer_kwargs": kwargs}
    with pytest.raises(ConfigError, match=named):
        TrainConfig.of({"data": {"train": {"datasets": [{"dataset_path": "rows.jsonl"}]}}, "training": training})
