"""Stacks of experts, filled expert by expert as a checkpoint is read.

Of experts that lie whole on devices, each goes to its own only. Those on other hosts' devices are not even converted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxis.errors import CheckpointError
from jaxis.kernels.weights import WeightValue
from jaxis.kernels.weights.shards import placement
from jaxis.layers.weight_loader import place_array
from jaxis.parallel.mesh import SPREAD_EXPERT, logical_sharding

Axes = tuple[str | None, ...]


class ExpertStack(Protocol):
    """Weights of X experts, of which some have arrived."""

    def is_here(self, expert: int, /) -> bool:
        """Returns whether this host needs the expert's weight."""
        ...

    def put(self, expert: int, weight: WeightValue, dtype: DTypeLike | None) -> None:
        """Adds an expert's weight of host arrays, of which nothing is read later; `dtype` converts them, unless None.

        Raises CheckpointError if the weight is of another type than an earlier one.
        """
        ...

    def stack(self) -> WeightValue:
        """Returns the stack, arrays [X, ...] on all devices, once every expert of this host was put."""
        ...


def new_stack(num_experts: int, axes: Axes) -> ExpertStack:
    """Makes a stack of weights [X, out, in] with these logical axes, on the current mesh."""
    mesh = jax.sharding.get_mesh()
    if axes[0] == SPREAD_EXPERT and mesh.size > 1:
        return SpreadStack(mesh, num_experts)
    return _SharedStack(num_experts, axes)


class _SharedStack:
    """Weights of X experts, each of which all devices share."""

    def __init__(self, num_experts: int, axes: Axes) -> None:
        self._num_experts, self._axes = num_experts, axes
        self._whole: WeightValue | None = None

    def is_here(self, _expert: int) -> bool:
        return True

    def put(self, expert: int, weight: WeightValue, dtype: DTypeLike | None) -> None:
        axes = placement(weight, self._axes)
        entry = jax.tree.map(lambda array: place_array(array, axes[1:]), weight)
        whole = self._whole
        if whole is None:
            whole = jax.tree.map(lambda array: self._zeros(array.shape, dtype or array.dtype, axes), entry)
        check_same_type(whole, entry, has_dtype=dtype is not None)
        # Pages are released two tensors later, so finish with this one first.
        self._whole = jax.block_until_ready(jax.tree.map(functools.partial(write_entry, index=expert), whole, entry))

    def stack(self) -> WeightValue:
        assert self._whole is not None
        return self._whole

    def _zeros(self, shape: tuple[int, ...], dtype: DTypeLike, axes: Axes) -> jax.Array:
        mesh, shape = jax.sharding.get_mesh(), (self._num_experts, *shape)
        return jnp.zeros(shape, dtype, device=None if mesh.empty else logical_sharding(mesh, axes, shape))


class SpreadStack:
    """Weights of X experts on the devices of this host."""

    def __init__(self, mesh: Mesh, num_experts: int) -> None:
        self._num_experts = num_experts
        spec = logical_sharding(mesh, (SPREAD_EXPERT,), (num_experts,)).spec
        # Trailing axes are whole.
        self._sharding = NamedSharding(mesh, PartitionSpec(*spec))
        places = self._sharding.addressable_devices_indices_map((num_experts,))
        self._experts = {device: range(num_experts)[index[0]] for device, index in places.items() if index is not None}
        self._parts: dict[Any, WeightValue] = {}  # by device

    def is_here(self, expert: int) -> bool:
        return any(expert in experts for experts in self._experts.values())

    def put(self, expert: int, weight: WeightValue, dtype: DTypeLike | None) -> None:
        """Adds an expert's weight on its devices of this host."""
        for device, experts in self._experts.items():
            if expert not in experts:
                continue
            # JAX refuses programs of other devices than the current mesh's.
            with jax.set_mesh(Mesh(np.asarray([device]), ("device",), axis_types=(AxisType.Auto,))):
                entry = jax.device_put(weight, device)
                part = self._parts.get(device)
                if part is None:
                    part = jax.tree.map(functools.partial(_zeros, num_entries=len(experts), dtype=dtype), entry)
                check_same_type(part, entry, has_dtype=dtype is not None)
                write = functools.partial(write_entry, index=expert - experts.start)
                # The file's pages are released soon, so finish with these first.
                self._parts[device] = jax.block_until_ready(jax.tree.map(write, part, entry))

    def stack(self) -> WeightValue:
        def whole(*parts: jax.Array) -> jax.Array:
            shape = (self._num_experts, *parts[0].shape[1:])
            return jax.make_array_from_single_device_arrays(shape, self._sharding, list(parts))

        return jax.tree.map(whole, *self._parts.values())


def check_same_type(stack: WeightValue, entry: WeightValue, *, has_dtype: bool) -> None:
    """Raises CheckpointError if an expert's weight has other types than earlier ones and no `dtype` converts it."""
    if not has_dtype and jax.tree.map(_type, stack) != jax.tree.map(_type, entry):
        raise CheckpointError("has a different type from those of the other experts")


def write_entry(stack: jax.Array, entry: jax.Array, index: int) -> jax.Array:
    """Writes an entry of a stack in place: the stack is donated and keeps its sharding."""
    return _writer(stack.sharding)(stack, entry, index)


def _type(array: Any) -> np.dtype:
    return array.dtype


def _zeros(entry: jax.Array, num_entries: int, dtype: DTypeLike | None) -> jax.Array:
    return jnp.zeros((num_entries, *entry.shape), dtype or entry.dtype, device=entry.sharding)


@functools.cache
def _writer(sharding: jax.sharding.Sharding) -> Callable[[jax.Array, jax.Array, int], jax.Array]:
    @functools.partial(jax.jit, donate_argnums=0, out_shardings=sharding)
    def write(stack: jax.Array, entry: jax.Array, index: int) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(stack, entry.astype(stack.dtype), index, 0)

    return write
