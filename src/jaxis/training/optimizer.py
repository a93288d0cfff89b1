"""Optimizers and schedules as users of TRL know them, made of optax."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxis.training.config import OPTIMIZERS, TrainingParams

Schedule = Callable[[Any], jax.Array]
"""From the number of steps before a step to its learning rate."""


def make_schedule(params: TrainingParams, num_steps: int) -> Schedule:
    """The learning rate, as transformers' schedules of the same names have it.

    Args:
      params: Which schedule.
      num_steps: Steps of the training.
    """
    kind, peak = params.lr_scheduler_type, params.learning_rate
    warmup = warmup_steps(params, num_steps)

    def rate(count: Any) -> jax.Array:
        count = jnp.asarray(count, jnp.float32)
        done = jnp.clip((count - warmup) / max(1, num_steps - warmup), 0.0, 1.0)
        falling = {"linear": 1 - done, "cosine": 0.5 * (1 + jnp.cos(math.pi * done))}.get(kind, jnp.ones_like(done))
        return peak * jnp.where(count < warmup, count / max(1, warmup), falling)

    return rate


def warmup_steps(params: TrainingParams, num_steps: int) -> int:
    """Steps in which the rate rises: `warmup_steps`, or else the share `warmup_ratio` of all, rounded up."""
    if params.lr_scheduler_type == "constant":
        return 0
    if params.warmup_steps is not None:
        return params.warmup_steps
    return math.ceil(num_steps * (params.warmup_ratio or 0.0))


def make_optimizer(params: TrainingParams, schedule: Schedule) -> optax.GradientTransformation:
    """AdamW, or SGD with momentum, as PyTorch computes them. Weight decay is of matrices only.

    Args:
      params: Which one.
      schedule: Its learning rate.
    """

    def is_matrix(trained: Any) -> Any:
        return jax.tree.map(lambda array: array.ndim > 1, trained)

    if OPTIMIZERS[params.optimizer] == "adamw":
        return optax.chain(
            _scale_by_adam(params.adam_beta1, params.adam_beta2, params.adam_epsilon),
            optax.add_decayed_weights(params.weight_decay, mask=is_matrix),
            optax.scale_by_learning_rate(schedule),
        )
    momentum = params.sgd_momentum or None
    return optax.chain(
        optax.add_decayed_weights(params.weight_decay, mask=is_matrix), optax.sgd(schedule, momentum=momentum)
    )


def _scale_by_adam(beta1: float, beta2: float, epsilon: float) -> optax.GradientTransformation:
    """`optax.scale_by_adam` (arXiv:1412.6980) with corrections of the moments' bias that float32 does not round away.

    optax takes `1 - 0.999 ** count` in float32, where it is off by 1.3e-5 of its size at first, and so is each update
    by half of that; PyTorch takes it in float64.
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
    """`1 - decay ** count`."""
    return -jnp.expm1(count * math.log(decay)) if decay else jnp.ones([])
