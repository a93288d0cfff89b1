"""Parameters that hold one tensor of each of X experts, filled expert by expert as a checkpoint is read."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxis.errors import CheckpointError
from jaxis.layers.weight_loader import place_array
from jaxis.loading.headers import HeaderTensor, reading_only_headers
from jaxis.parallel.mesh import logical_sharding


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PartialStack:
    """The value of a parameter of which experts are missing.

    Attributes:
      stack: What is filled so far; a method's own kind of array.
      target: Shape [X, ...] and type in the end. Abstract, so that an incomplete parameter counts as not loaded.
      loaded: The experts that are there.
    """

    stack: Any
    target: jax.ShapeDtypeStruct
    loaded: frozenset[int] = field(metadata={"static": True})

    @property
    def missing(self) -> list[int]:
        """The experts that are not there."""
        return [expert for expert in range(self.target.shape[0]) if expert not in self.loaded]


def load_expert(param: nnx.Param, expert: int, tensor: np.ndarray) -> None:
    """Puts an expert's tensor, cast to the parameter's type, into its place on the parameter's devices.

    Raises:
      CheckpointError: Its shape is not that of the parameter's entries, or the expert is there already.
    """
    axes = param.get_metadata().get("logical_axes")

    def write(stack: jax.Array | None, target: jax.ShapeDtypeStruct) -> jax.Array:
        if stack is None:
            stack = _zeros(target, axes)
        entry = place_array(tensor, None if axes is None else axes[1:])
        # By the time that the tensor after the next is asked for, this one's file pages are given up.
        return jax.block_until_ready(_writer(stack.sharding)(stack, entry, expert))

    fill_expert(param, expert, tensor.shape, write)


def fill_expert(
    param: nnx.Param, expert: int, shape: tuple[int, ...], write: Callable[[Any, jax.ShapeDtypeStruct], Any]
) -> None:
    """Keeps count of which experts a parameter has; what the stack is and how an entry gets there, `write` says.

    Args:
      param: Of abstract value [X, ...], or one that this function has begun to fill.
      expert: Which entry.
      shape: Of the checkpoint's tensor.
      write: Takes the stack so far (None at first) and the parameter's abstract value; returns the stack with the
        expert's entry, which becomes the parameter's value once no expert is missing.

    Raises:
      CheckpointError: The shape is not that of the parameter's entries, or the expert is there already.
    """
    value = param.get_value()
    if isinstance(value, PartialStack):
        stack, target, loaded = value.stack, value.target, value.loaded
    elif isinstance(value, jax.ShapeDtypeStruct):
        stack, target, loaded = None, value, frozenset()
    else:
        raise CheckpointError(f"is a second one for expert {expert}")
    if expert in loaded:
        raise CheckpointError(f"is a second one for expert {expert}")
    if tuple(shape) != target.shape[1:]:
        raise CheckpointError(
            f"has {list(shape)} for an expert in the checkpoint, {list(target.shape[1:])} in the model"
        )
    loaded |= {expert}
    if not reading_only_headers():
        stack = write(stack, target)
    elif len(loaded) == target.shape[0]:
        stack = HeaderTensor.of(target.shape, target.dtype)
    param.set_value(stack if len(loaded) == target.shape[0] else PartialStack(stack, target, loaded))


def _zeros(target: jax.ShapeDtypeStruct, axes: tuple[str | None, ...] | None) -> jax.Array:
    mesh = jax.sharding.get_mesh()
    device = None if mesh.empty else logical_sharding(mesh, axes, target.shape)
    return jnp.zeros(target.shape, target.dtype, device=device)


@functools.cache
def _writer(sharding: jax.sharding.Sharding) -> Callable[[jax.Array, jax.Array, int], jax.Array]:
    """Writes an entry in place: the stack is donated and keeps its sharding."""

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=sharding)
    def write(stack: jax.Array, entry: jax.Array, index: int) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(stack, entry.astype(stack.dtype), index, 0)

    return write
