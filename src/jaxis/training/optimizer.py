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
        return optax.adamw(
            schedule,
            b1=params.adam_beta1,
            b2=params.adam_beta2,
            eps=params.adam_epsilon,
            weight_decay=params.weight_decay,
            mask=is_matrix,
        )
    momentum = params.sgd_momentum or None
    return optax.chain(
        optax.add_decayed_weights(params.weight_decay, mask=is_matrix), optax.sgd(schedule, momentum=momentum)
    )
