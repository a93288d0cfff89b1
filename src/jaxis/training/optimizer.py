"""Optimizers and learning rate schedules with TRL's names, built on optax."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from jaxis.training.config.training import OPTIMIZERS, TrainingParams

Schedule = Callable[[Any], jax.Array]
"""Function from the number of finished steps to the learning rate of the next."""


def make_schedule(params: TrainingParams, num_steps: int) -> Schedule:
    """Makes the learning rate schedule of `num_steps` steps, as transformers' schedules of the same names."""
    kind, peak = params.lr_scheduler_type, params.learning_rate
    warmup = warmup_steps(params, num_steps)

    def rate(count: Any) -> jax.Array:
        count = jnp.asarray(count, jnp.float32)
        done = jnp.clip((count - warmup) / max(1, num_steps - warmup), 0.0, 1.0)
        falling = {"linear": 1 - done, "cosine": 0.5 * (1 + jnp.cos(math.pi * done))}.get(kind, jnp.ones_like(done))
        return peak * jnp.where(count < warmup, count / max(1, warmup), falling)

    return rate


def warmup_steps(params: TrainingParams, num_steps: int) -> int:
    """Returns the number of warm-up steps: `warmup_steps`, or else the share `warmup_ratio` of all, rounded up."""
    if params.lr_scheduler_type == "constant":
        return 0
    if params.warmup_steps is not None:
        return params.warmup_steps
    return math.ceil(num_steps * (params.warmup_ratio or 0.0))


def make_optimizer(
    params: TrainingParams, schedule: Schedule, logical_axes: Mapping[str, tuple[str | None, ...]] | None = None
) -> optax.GradientTransformation:
    """Makes AdamW, SGD with momentum, or Muon, as PyTorch computes them. Only matrices have weight decay.

    `logical_axes` has those of trained arrays, by name.
    """

    def is_matrix(trained: Any) -> Any:
        return jax.tree.map(lambda array: array.ndim > 1, trained)

    kind = OPTIMIZERS[params.optimizer]
    if kind == "sgd":
        momentum = params.sgd_momentum or None
        return optax.chain(
            optax.add_decayed_weights(params.weight_decay, mask=is_matrix), optax.sgd(schedule, momentum=momentum)
        )
    scale = _scale_by_adam(params.adam_beta1, params.adam_beta2, params.adam_epsilon)
    if kind == "muon":
        scale = _scale_by_muon(scale, logical_axes or {})
    return optax.chain(
        scale,
        optax.add_decayed_weights(params.weight_decay, mask=is_matrix),
        optax.scale_by_learning_rate(schedule),
    )


def _scale_by_adam(beta1: float, beta2: float, epsilon: float) -> optax.GradientTransformation:
    """`optax.scale_by_adam` (arXiv:1412.6980) with bias corrections that are exact in float32.

    optax computes `1 - 0.999 ** count` in float32, where the relative error is 1.3e-5 at first, and half of that in
    each update. PyTorch computes it in float64.
    """

    def init(params: optax.Params) -> optax.OptState:
        zeros = [jax.tree.map(jnp.zeros_like, params) for _ in range(2)]
        return optax.ScaleByAdamState(jnp.zeros([], jnp.int32), *zeros)

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        del params
        assert isinstance(state, optax.ScaleByAdamState)
        mean = jax.tree.map(lambda old, new: beta1 * old + (1 - beta1) * new, state.mu, updates)
        square = jax.tree.map(lambda old, new: beta2 * old + (1 - beta2) * jnp.square(new), state.nu, updates)
        count = jnp.asarray(state.count) + 1
        of_mean, of_square = _bias_correction(beta1, count), _bias_correction(beta2, count)
        updates = jax.tree.map(lambda m, v: (m / of_mean) / (jnp.sqrt(v / of_square) + epsilon), mean, square)
        return updates, optax.ScaleByAdamState(count, mean, square)

    return optax.GradientTransformation(init, update)


def _bias_correction(decay: float, count: jax.Array) -> jax.Array:
    return -jnp.expm1(count * math.log(decay)) if decay else jnp.ones([])


MUON_MOMENTUM = 0.95
_MUON_COEFFICIENTS, _MUON_ITERATIONS, _MUON_EPSILON = (3.4445, -4.7750, 2.0315), 5, 1e-7


class _MuonState(NamedTuple):
    """State of Muon: moving averages of hidden matrices' gradients, and Adam's state of all other arrays."""

    averages: dict[str, jax.Array]
    others: optax.OptState


def _scale_by_muon(
    others: optax.GradientTransformation, logical_axes: Mapping[str, tuple[str | None, ...]]
) -> optax.GradientTransformation:
    """Muon (https://kellerjordan.github.io/posts/muon/) for hidden matrices, `others` for all other arrays.

    Updates are as large as Adam's (arXiv:2502.16982), as in `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"`.
    An array with a vocabulary among its logical axes is no hidden matrix.
    """

    def is_hidden(name: str, array: jax.Array) -> bool:
        return array.ndim > 1 and min(array.shape[-2:]) > 1 and "vocab" not in logical_axes.get(name, ())

    def divided(arrays: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        hidden = {name: array for name, array in arrays.items() if is_hidden(name, array)}
        return hidden, {name: array for name, array in arrays.items() if name not in hidden}

    def init(params: optax.Params) -> optax.OptState:
        hidden, rest = divided(cast(dict[str, jax.Array], params))
        return _MuonState(jax.tree.map(jnp.zeros_like, hidden), others.init(rest))

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        del params
        assert isinstance(state, _MuonState)
        hidden, rest = divided(cast(dict[str, jax.Array], updates))
        averages = {
            name: _towards(state.averages[name], gradient, 1 - MUON_MOMENTUM) for name, gradient in hidden.items()
        }
        directions = {
            name: _muon_update(_towards(hidden[name], each, MUON_MOMENTUM)) for name, each in averages.items()
        }
        of_rest, state_of_rest = others.update(rest, state.others)
        return directions | cast(dict[str, jax.Array], of_rest), _MuonState(averages, state_of_rest)

    return optax.GradientTransformation(init, update)


def _towards(start: jax.Array, end: jax.Array, share: float) -> jax.Array:
    return start + share * (end - start)


def _muon_update(matrices: jax.Array) -> jax.Array:
    """Orthogonalizes matrices [..., M, N] by Newton-Schulz iterations and scales them by 0.2 sqrt(max(M, N))."""
    a, b, c = _MUON_COEFFICIENTS
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x /= jnp.maximum(jnp.linalg.norm(x, axis=(-2, -1), keepdims=True), _MUON_EPSILON)
    for _ in range(_MUON_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return 0.2 * math.sqrt(max(matrices.shape[-2:])) * (x.mT if is_tall else x)
