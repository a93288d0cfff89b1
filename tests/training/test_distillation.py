"""Distillation's losses, gradients and steps are TRL's, and equal models have none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from jaxis.training.distillation.divergence import TILE, divergence
from jaxis.training.objectives import in_chunks
from tests.training.gradients import largest_error

BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)


def torch_divergence(student, teacher, beta):
    """TRL's definition, from logits [..., V]."""
    ours, theirs = student.log_softmax(-1), teacher.log_softmax(-1)

    def divergences(target, given):
        return F.kl_div(given, target, reduction="none", log_target=True).sum(-1)

    if beta in (0, 1):
        return divergences(ours, theirs) if beta else divergences(theirs, ours)
    mixture = torch.logsumexp(torch.stack([ours + np.log1p(-beta), theirs + np.log(beta)]), dim=0)
    return beta * divergences(theirs, mixture) + (1 - beta) * divergences(ours, mixture)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("spread", [0.1, 2.0, 10.0])
def test_values_and_slopes_are_those_of_torch(beta, spread):
    student, teacher = np.random.default_rng(0).normal(0, spread, (2, 6, TILE + 300)).astype(np.float32)

    def torchs(dtype):
        theirs = torch.tensor(student, dtype=dtype, requires_grad=True)
        values = torch_divergence(theirs, torch.tensor(teacher, dtype=dtype), beta)
        values.sum().backward()
        return values.detach().numpy(), theirs.grad.numpy()

    found = jax.jit(divergence, static_argnums=2)(student, teacher, beta)
    for mine, exact, rounded in zip(found, torchs(torch.float64), torchs(torch.float32), strict=True):
        assert largest_error(np.asarray(mine), exact) < max(1e-5, 2 * largest_error(rounded, exact))


@pytest.mark.parametrize("beta", BETAS)
def test_equal_logits_have_no_divergence_and_tokens_that_neither_has_no_nan(beta):
    logits = np.random.default_rng(0).normal(0, 5, (4, 300)).astype(np.float32)
    logits[:, 7] = -np.inf
    values, slopes = divergence(logits, logits, beta)
    assert not np.any(values)
    assert not np.any(slopes)
    other = np.roll(logits, 1, axis=0)
    assert np.all(np.isfinite(divergence(logits, other, beta)[0]))


@pytest.mark.parametrize("head_is_frozen", [True, False])
def test_in_chunks_only_learned_tokens_count(head_is_frozen):
    rng = np.random.default_rng(0)
    hidden, theirs = rng.normal(size=(2, 150, 8)).astype(np.float32)
    head, other_head = rng.normal(size=(2, 8, 40)).astype(np.float32)
    learned = rng.random(150) < 0.4

    def loss(hidden, head):
        def of_chunk(logits, rows):
            return divergence(logits, rows @ other_head, 0.5)

        others = {"head_is_frozen": head_is_frozen, "chunk_tokens": 64}
        [values] = in_chunks(of_chunk, lambda rows: rows @ head, hidden, learned, jnp.asarray(theirs), **others)
        return values.sum()

    total, found = jax.value_and_grad(loss, argnums=(0,) if head_is_frozen else (0, 1))(hidden, head)
    torch_hidden, torch_head = (torch.tensor(each, requires_grad=True) for each in (hidden, head))
    expected = torch_divergence(torch_hidden @ torch_head, torch.tensor(theirs @ other_head), 0.5)[learned].sum()
    expected.backward()
    np.testing.assert_allclose(total, expected.item(), rtol=1e-5)
    for mine, wanted in zip(found, (torch_hidden.grad.numpy(), torch_head.grad.numpy()), strict=False):
        np.testing.assert_allclose(mine, wanted, atol=1e-5 * np.abs(wanted).max())
