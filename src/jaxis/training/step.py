"""One step of training: gradients of all micro-batches, summed and divided once, clipped, applied."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
import optax

from jaxis.engine.execution.program_context import jit
from jaxis.training.batches import TrainingBatch
from jaxis.training.functional_model import Values
from jaxis.training.objectives import Forward, Objective, Sums

Trained = dict[str, jax.Array]
"""What is trained, float32, by name."""
Combine = Callable[[Mapping[str, jax.Array], Values], Values]
"""(What is trained, what is frozen) -> what the model's parameters hold."""


class StepFunction(Protocol):
    """A step of training as a compiled function, which takes over the first and the third argument."""

    def __call__(
        self, trained: Trained, frozen: Values, state: optax.OptState, batch: TrainingBatch, key: jax.Array
    ) -> tuple[Trained, optax.OptState, Sums]:
        """The new weights, the new state of the optimizer, and what is reported."""
        ...


def sum_of_micro_batches(
    forward: Forward,
    objective: Objective,
    combine: Combine,
    trained: Trained,
    frozen: Values,
    batch: TrainingBatch,
    key: Any,
) -> tuple[jax.Array, Trained, Sums]:
    """The sums over all micro-batches: the loss, its gradient, and what is reported."""

    def loss(trained: Trained, micro_batch: TrainingBatch, number: jax.Array) -> tuple[jax.Array, Sums]:
        key_here = jax.random.fold_in(key, number)
        return objective.loss(forward, combine(trained, frozen), frozen, micro_batch, key_here)

    differentiate = jax.value_and_grad(loss, has_aux=True)

    def add(so_far: Any, each: tuple[TrainingBatch, jax.Array]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, so_far, differentiate(trained, *each)), None

    numbers = jnp.arange(len(batch.ids))
    micro_batches = (batch, numbers)
    one = jax.tree.map(lambda array: array[0], micro_batches)
    nothing = jax.tree.map(lambda each: jnp.zeros(each.shape, each.dtype), jax.eval_shape(differentiate, trained, *one))
    ((total, sums), gradient), _ = jax.lax.scan(add, nothing, micro_batches)
    return total, gradient, sums


def make_step(
    forward: Forward,
    objective: Objective,
    combine: Combine,
    optimizer: optax.GradientTransformation,
    max_grad_norm: float,
) -> StepFunction:
    """A step of training.

    Args:
      forward: The model.
      objective: What is minimized.
      combine: From what is trained to what the model's parameters hold.
      optimizer: From gradients to updates.
      max_grad_norm: To which the gradient is scaled down; 0: it is not.
    """

    @functools.partial(jit, donate_argnums=(0, 2))
    def step(
        trained: Trained, frozen: Values, state: optax.OptState, batch: TrainingBatch, key: jax.Array
    ) -> tuple[Trained, optax.OptState, Sums]:
        total, gradient, sums = sum_of_micro_batches(forward, objective, combine, trained, frozen, batch, key)
        weight = objective.weight(batch)
        gradient = jax.tree.map(lambda array: array / weight, gradient)
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(array)) for array in jax.tree.leaves(gradient)))
        if max_grad_norm:
            scale = jnp.minimum(1.0, max_grad_norm / (norm + 1e-6))
            gradient = jax.tree.map(lambda array: array * scale, gradient)
        updates, state = optimizer.update(gradient, state, trained)
        means = {name: value / weight for name, value in sums.items()}
        new = cast(Trained, optax.apply_updates(cast(optax.Params, trained), updates))
        return new, state, {"loss": total / weight, **means, "grad_norm": norm}

    return step


Evaluate = Callable[[Trained, Values, TrainingBatch], tuple[jax.Array, jax.Array, Sums]]
"""(What is trained, what is frozen, a batch of one micro-batch) -> the sum of losses, their weight, and other sums that
are reported."""


def make_evaluation(forward: Forward, objective: Objective, combine: Combine) -> Evaluate:
    """The compiled function that measures a batch.

    Args:
      forward: The model, as it is served.
      objective: What is measured.
      combine: From what is trained to what the model's parameters hold.
    """

    @jit
    def evaluate(trained: Trained, frozen: Values, batch: TrainingBatch) -> tuple[jax.Array, jax.Array, Sums]:
        micro_batch = jax.tree.map(lambda array: array[0], batch)
        total, sums = objective.loss(forward, combine(trained, frozen), frozen, micro_batch, jax.random.key(0))
        return total, objective.weight(batch), sums

    return evaluate
