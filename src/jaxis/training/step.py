"""One step of training: gradients of all micro-batches, summed and divided once, clipped, applied."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxis.engine.execution.program_context import jit
from jaxis.parallel.mesh import put
from jaxis.training.batches import TrainingBatch
from jaxis.training.functional_model import Values
from jaxis.training.layer_calls import RouterSums
from jaxis.training.objectives import MAXIMUM, Forward, Objective, Sums
from jaxis.training.sharding import Devices, Placement

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


class GradientFunction(Protocol):
    """The sums over all micro-batches and devices."""

    def __call__(
        self, trained: Trained, frozen: Values, batch: TrainingBatch, key: jax.Array
    ) -> tuple[jax.Array, Trained, Sums]:
        """The loss, its gradient, and what is reported."""
        ...


def begin(initial: Trained, frozen: Values, optimizer: optax.GradientTransformation) -> tuple[Trained, optax.OptState]:
    """What the first step takes: the values to train and the optimizer's state.

    Both are on the mesh of the model's arrays, as a step returns them: others would have it compiled once more.
    """
    leaves = [leaf for leaf in jax.tree.leaves((initial, frozen)) if isinstance(leaf, jax.Array)]
    meshes = [leaf.sharding.mesh for leaf in leaves if isinstance(leaf.sharding, NamedSharding)]

    def on_mesh(leaf: jax.Array) -> jax.Array:
        if not meshes or isinstance(leaf.sharding, NamedSharding):
            return leaf
        return put(leaf, NamedSharding(meshes[0], PartitionSpec()))

    trained = jax.tree.map(on_mesh, initial)
    return trained, jax.tree.map(on_mesh, optimizer.init(trained))


def make_gradient(
    forward: Forward,
    objective: Objective,
    combine: Combine,
    placement: Placement | None = None,
    router_coefficient: float = 0.0,
) -> GradientFunction:
    """The gradient of the sum of losses; arguments as of `make_step`."""
    devices = Devices() if placement is None else placement.devices
    trained_axes, frozen_axes = (None, None) if placement is None else (placement.trained, placement.frozen)

    def of_device(
        trained: Trained, frozen: Values, batch: TrainingBatch, key: jax.Array
    ) -> tuple[jax.Array, Trained, Sums]:
        frozen = devices.shards(frozen, frozen_axes)

        def loss(trained: Trained, micro_batch: TrainingBatch, number: jax.Array) -> tuple[jax.Array, Sums]:
            key_here = jax.random.fold_in(key, number)
            losses = objective.loss(forward, combine(trained, frozen), frozen, micro_batch, key_here)
            if losses.router_sums is None:
                return losses.total, losses.sums
            weighted = _router_loss(losses.router_sums, devices) * devices.sum(objective.weight(micro_batch))
            return losses.total + router_coefficient * weighted, {**losses.sums, "aux_loss": weighted}

        differentiate = jax.value_and_grad(loss, has_aux=True)
        parts = devices.shards(trained, trained_axes)

        def add(so_far: Any, each: tuple[TrainingBatch, jax.Array]) -> tuple[Any, None]:
            (total, sums), gradient = so_far
            (one, reported), change = differentiate(parts, *each)
            sums = {name: _joined(name, sums[name], value) for name, value in reported.items()}
            return ((total + one, sums), jax.tree.map(jnp.add, gradient, change)), None

        micro_batches = (batch, jnp.arange(len(batch.ids)))
        one = jax.tree.map(lambda array: array[0], micro_batches)
        nothing = jax.tree.map(
            lambda each: jnp.zeros(each.shape, each.dtype), jax.eval_shape(differentiate, parts, *one)
        )
        ((total, sums), gradient), _ = jax.lax.scan(add, nothing, micro_batches)
        total, sums = devices.sum((total, sums))
        return total, devices.sum_gradient(gradient), sums

    return devices.on_each(of_device, trained_axes, frozen_axes, (-1, trained_axes, -1))


def _joined(name: str, one: jax.Array, other: jax.Array) -> jax.Array:
    return jnp.maximum(one, other) if name.endswith(MAXIMUM) else one + other


def _router_loss(sums: RouterSums, devices: Devices) -> jax.Array:
    """This device's part of the loss that balances routers (arXiv:2101.03961), as transformers computes it: over the
    tokens of all layers together."""
    chosen, rows = devices.sum(jax.lax.stop_gradient((sums.chosen, sums.rows)))
    rows = jnp.maximum(rows, 1.0)
    return len(chosen) * jnp.dot(chosen / rows, sums.probability / rows)


def make_step(
    forward: Forward,
    objective: Objective,
    combine: Combine,
    optimizer: optax.GradientTransformation,
    max_grad_norm: float,
    placement: Placement | None = None,
    router_coefficient: float = 0.0,
) -> StepFunction:
    """A step of training.

    Args:
      forward: The model.
      objective: What is minimized.
      combine: From what is trained to what the model's parameters hold.
      optimizer: From gradients to updates.
      max_grad_norm: To which the gradient is scaled down; 0: it is not.
      placement: Where the arrays are; None: on one device.
      router_coefficient: Multiplies the loss that balances routers, if `forward` observes them.
    """
    differentiate = make_gradient(forward, objective, combine, placement, router_coefficient)

    @functools.partial(jit, donate_argnums=(0, 2))
    def step(
        trained: Trained, frozen: Values, state: optax.OptState, batch: TrainingBatch, key: jax.Array
    ) -> tuple[Trained, optax.OptState, Sums]:
        total, gradient, sums = differentiate(trained, frozen, batch, key)
        weight = objective.weight(batch)
        gradient = jax.tree.map(lambda array: array / weight, gradient)
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(array)) for array in jax.tree.leaves(gradient)))
        if max_grad_norm:
            scale = jnp.minimum(1.0, max_grad_norm / (norm + 1e-6))
            gradient = jax.tree.map(lambda array: array * scale, gradient)
        updates, state = optimizer.update(gradient, state, trained)
        means = {name: value if name.endswith(MAXIMUM) else value / weight for name, value in sums.items()}
        new = cast(Trained, optax.apply_updates(cast(optax.Params, trained), updates))
        return new, state, {"loss": total / weight, **means, "grad_norm": norm}

    return step


Evaluate = Callable[[Trained, Values, TrainingBatch], tuple[jax.Array, jax.Array, Sums]]
"""(What is trained, what is frozen, a batch of one micro-batch) -> the sum of losses, their weight, and other sums that
are reported."""


def make_evaluation(
    forward: Forward, objective: Objective, combine: Combine, placement: Placement | None = None
) -> Evaluate:
    """The compiled function that measures a batch.

    Args:
      forward: The model, as it is served.
      objective: What is measured.
      combine: From what is trained to what the model's parameters hold.
      placement: Where the arrays are; None: on one device.
    """
    devices = Devices() if placement is None else placement.devices
    trained_axes, frozen_axes = (None, None) if placement is None else (placement.trained, placement.frozen)

    def of_device(
        trained: Trained, frozen: Values, batch: TrainingBatch, key: jax.Array
    ) -> tuple[jax.Array, jax.Array, Sums]:
        micro_batch = jax.tree.map(lambda array: array[0], batch)
        frozen = devices.shards(frozen, frozen_axes)
        values = combine(devices.shards(trained, trained_axes), frozen)
        losses = objective.loss(forward, values, frozen, micro_batch, key)
        return devices.sum((losses.total, objective.weight(batch), losses.sums))

    on_each = devices.on_each(of_device, trained_axes, frozen_axes, (-1, -1, -1))
    return jit(lambda trained, frozen, batch: on_each(trained, frozen, batch, jax.random.key(0)))
