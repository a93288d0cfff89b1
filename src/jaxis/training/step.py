"""One step of training: gradients of all micro-batches, summed and divided once, clipped, applied."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxis.engine.execution.program_context import jit
from jaxis.parallel.mesh import put
from jaxis.training.batches import TrainingBatch
from jaxis.training.functional_model import RouterSums, Values
from jaxis.training.objectives import Objective, Reported, Scalars
from jaxis.training.scores import Forward
from jaxis.training.sharding import WHOLE, Devices, Placement

Trained = dict[str, jax.Array]
"""Trained arrays, float32, by name."""
Combine = Callable[[Mapping[str, jax.Array], Values], Values]
"""Function of trained and frozen arrays that returns the values of the model's parameters."""


StepFunction = Callable[
    [Trained, Values, optax.OptState, TrainingBatch, jax.Array], tuple[Trained, optax.OptState, Scalars]
]
"""A compiled step of trained and frozen arrays, the optimizer's state, a batch and a random key.

It returns the new weights, the new optimizer state and reported values, and donates its first and third arguments.
"""
GradientFunction = Callable[[Trained, Values, TrainingBatch, jax.Array], tuple[jax.Array, Trained, Reported]]
"""A function of trained and frozen arrays, a batch and a random key.

It returns the loss, its gradient and reported values, summed over all micro-batches and devices.
"""


def begin(initial: Trained, frozen: Values, optimizer: optax.GradientTransformation) -> tuple[Trained, optax.OptState]:
    """Returns the first step's arguments: the trained arrays and the optimizer's state.

    Both are on the mesh of the model's arrays, as a step returns them. Otherwise the second step would compile again.
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
    """Makes the gradient of the summed losses; arguments as of `make_step`."""
    devices = Devices() if placement is None else placement.devices
    trained_specs, frozen_specs = (None, None) if placement is None else (placement.trained, placement.frozen)

    def of_device(
        trained: Trained, frozen: Values, batch: TrainingBatch, key: jax.Array
    ) -> tuple[jax.Array, Trained, Reported]:
        frozen = devices.shards(frozen, frozen_specs)

        def loss(trained: Trained, micro_batch: TrainingBatch, number: jax.Array) -> tuple[jax.Array, Reported]:
            key_here = jax.random.fold_in(key, number)
            losses = objective.loss(forward, combine(trained, frozen), frozen, micro_batch, key_here)
            if losses.router_sums is None:
                return losses.total, losses.reported
            weighted = _router_loss(losses.router_sums, devices) * devices.sum(objective.weight(micro_batch))
            sums = {**losses.reported.sums, "aux_loss": weighted}
            return losses.total + router_coefficient * weighted, dataclasses.replace(losses.reported, sums=sums)

        differentiate = jax.value_and_grad(loss, has_aux=True)
        parts = devices.shards(trained, trained_specs)

        def add(so_far: Any, each: tuple[TrainingBatch, jax.Array]) -> tuple[Any, None]:
            (total, reported), gradient = so_far
            (one, new), change = differentiate(parts, *each)
            return ((total + one, reported.joined(new)), jax.tree.map(jnp.add, gradient, change)), None

        micro_batches = (batch, jnp.arange(len(batch.ids)))
        one = jax.tree.map(lambda array: array[0], micro_batches)
        nothing = jax.tree.map(
            lambda each: jnp.zeros(each.shape, each.dtype), jax.eval_shape(differentiate, parts, *one)
        )
        ((total, reported), gradient), _ = jax.lax.scan(add, nothing, micro_batches)
        return devices.sum(total), devices.sum_gradient(gradient), reported.of_all(devices)

    return devices.on_each(of_device, trained_specs, frozen_specs, (WHOLE, trained_specs, WHOLE))


def _router_loss(sums: RouterSums, devices: Devices) -> jax.Array:
    """Computes this device's part of routers' load-balancing loss (arXiv:2101.03961), over the tokens of all layers."""
    chosen, num_tokens = devices.sum(jax.lax.stop_gradient((sums.chosen, sums.num_tokens)))
    num_tokens = jnp.maximum(num_tokens, 1.0)
    return len(chosen) * jnp.dot(chosen / num_tokens, sums.probability / num_tokens)


def make_step(
    forward: Forward,
    objective: Objective,
    combine: Combine,
    optimizer: optax.GradientTransformation,
    max_grad_norm: float,
    placement: Placement | None = None,
    router_coefficient: float = 0.0,
    begun: tuple[Trained, optax.OptState] | None = None,
) -> StepFunction:
    """Makes a step of training.

    `combine` makes the model's parameters of trained and frozen arrays. Gradients of a norm above `max_grad_norm` (0:
    no limit) are scaled down. Without a placement, arrays are on one device. `router_coefficient` is the factor of the
    routers' load-balancing loss, if `forward` observes routers. On several devices, `begun`, from `begin`, tells where
    the results lie; XLA may otherwise divide them in another way.
    """
    differentiate = make_gradient(forward, objective, combine, placement, router_coefficient)
    options: dict[str, Any] = {"donate_argnums": (0, 2)}
    if begun is not None and placement is not None and placement.devices.num_devices > 1:
        options["out_shardings"] = (*jax.tree.map(lambda leaf: leaf.sharding, begun), None)

    @functools.partial(jit, **options)
    def step(
        trained: Trained, frozen: Values, state: optax.OptState, batch: TrainingBatch, key: jax.Array
    ) -> tuple[Trained, optax.OptState, Scalars]:
        total, gradient, reported = differentiate(trained, frozen, batch, key)
        weight = objective.weight(batch)
        gradient = jax.tree.map(lambda array: array / weight, gradient)
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(array)) for array in jax.tree.leaves(gradient)))
        if max_grad_norm:
            scale = jnp.minimum(1.0, max_grad_norm / (norm + 1e-6))
            gradient = jax.tree.map(lambda array: array * scale, gradient)
        updates, state = optimizer.update(gradient, state, trained)
        new = cast(Trained, optax.apply_updates(cast(optax.Params, trained), updates))
        return new, state, {"loss": total / weight, **reported.divided(weight), "grad_norm": norm}

    return step


Evaluate = Callable[[Trained, Values, TrainingBatch], tuple[jax.Array, jax.Array, Scalars]]
"""Function of trained arrays, frozen arrays and a batch of one micro-batch. It returns the sum of losses, their weight,
and sums of other reported values."""


def make_evaluation(
    forward: Forward, objective: Objective, combine: Combine, placement: Placement | None = None
) -> Evaluate:
    """Makes the compiled function that measures a batch, by the forward pass of the model as it is served.

    The other arguments are those of `make_step`.
    """
    devices = Devices() if placement is None else placement.devices
    trained_specs, frozen_specs = (None, None) if placement is None else (placement.trained, placement.frozen)

    def of_device(
        trained: Trained, frozen: Values, batch: TrainingBatch, key: jax.Array
    ) -> tuple[jax.Array, jax.Array, Scalars]:
        micro_batch = jax.tree.map(lambda array: array[0], batch)
        frozen = devices.shards(frozen, frozen_specs)
        values = combine(devices.shards(trained, trained_specs), frozen)
        losses = objective.loss(forward, values, frozen, micro_batch, key)
        return devices.sum((losses.total, objective.weight(batch), losses.reported.sums))

    on_each = devices.on_each(of_device, trained_specs, frozen_specs, (WHOLE, WHOLE, WHOLE))
    return jit(lambda trained, frozen, batch: on_each(trained, frozen, batch, jax.random.key(0)))
