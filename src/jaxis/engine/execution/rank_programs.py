"""Programs of one data rank, run by all ranks of the mesh at once.

A program's inputs and results of all ranks lie one after the other along their first axis, which the ranks divide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxis.parallel.mesh import DATA_AXIS, MESH_AXES, MODEL_AXIS, data_spec, put


class RankPrograms:
    """Makes programs of all data ranks of a mesh from those of one. With one rank, they are the same.

    Attributes:
      num_ranks: Number of data ranks (D).
      sharding: Sharding of arrays of which each rank has its own part.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.num_ranks = mesh.shape[DATA_AXIS]
        self.sharding = NamedSharding(mesh, PartitionSpec(DATA_AXIS) if self.num_ranks > 1 else PartitionSpec())

    def struct(self, shape: tuple[int, ...], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        """Returns the struct of all ranks' arrays together; each rank's array has this shape."""
        first, *rest = shape
        return jax.ShapeDtypeStruct((self.num_ranks * first, *rest), dtype, sharding=self.sharding)

    def place(self, parts: np.ndarray) -> np.ndarray | jax.Array:
        """Returns all ranks' arrays as the argument of a program."""
        return parts if self.num_ranks == 1 else put(parts, self.sharding)

    def over_ranks(self, function: Callable[..., Any], operands: Any, results: Any) -> Callable[..., Any]:
        """Returns a function of all ranks together, made from a function of one rank.

        Inside, the axis "data" is manual, and XLA divides each rank's own part of the program over "model". Each rank
        gets its part of the `operands` (arrays or structs of all ranks) that their sharding divides over "data", and
        all of the others. `results` are the shardings of all ranks' results.
        """
        if self.num_ranks == 1:
            return function
        # If XLA has nothing to divide, all axes are manual: it cannot divide a kernel, not even by one.
        axes = {DATA_AXIS} if self._mesh.shape[MODEL_AXIS] > 1 else set(MESH_AXES)
        in_specs = tuple(jax.tree.map(lambda array: _spec(array.sharding), operand) for operand in operands)
        return jax.shard_map(
            function,
            in_specs=in_specs,
            out_specs=jax.tree.map(_spec, results),
            axis_names=axes,
            check_vma=False,
        )

    def take(self, x: jax.Array, rows: jax.Array) -> jax.Array:
        """Returns, inside a program, rows [R, ...] of all ranks' arrays on every rank.

        `x` is this rank's part, [N, ...]. `rows`, i32 [R], are counted through all parts, and are the same on every
        rank.
        """
        if self.num_ranks == 1:
            return x[rows]
        own = rows - jax.lax.axis_index(DATA_AXIS) * x.shape[0]
        is_own = ((own >= 0) & (own < x.shape[0])).reshape(-1, *[1] * (x.ndim - 1))
        return jax.lax.psum(jnp.where(is_own, x[jnp.clip(own, 0, x.shape[0] - 1)], 0), DATA_AXIS)


def _spec(sharding: jax.sharding.Sharding) -> PartitionSpec:
    return data_spec(sharding) if isinstance(sharding, NamedSharding) else PartitionSpec()
