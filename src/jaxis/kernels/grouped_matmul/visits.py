"""Schedule of the TPU and GPU kernels: the rows and the group that each tile of a grouped product computes."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Visits:
    """At most V visits of tiles of rows, in the order of the rows.

    Attributes:
      groups, first_rows: i32 [V], the group of each visit, and the first row of its tile.
      starts, ends: i32 [X], the first row of each group, and one past its last.
      count: i32 [1], the number of visits. Later entries repeat the last visit, so that they read nothing new.
    """

    groups: jax.Array
    first_rows: jax.Array
    starts: jax.Array
    ends: jax.Array
    count: jax.Array


def visits(group_sizes: jax.Array, num_rows: int, tile_rows: int, *, aligned: bool) -> Visits:
    """Covers each group's rows with tiles of `tile_rows` rows; group_sizes are i32 [X], their sum at most `num_rows`.

    Aligned tiles begin at multiples of tile_rows. Neighbouring groups may then share a tile, which is visited once for
    each. Otherwise a group's first tile begins at its first row.
    """
    num_groups = len(group_sizes)
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    starts = ends - group_sizes
    origins = starts // tile_rows * tile_rows if aligned else starts
    counts = jnp.where(group_sizes > 0, -(-(ends - origins) // tile_rows), 0)
    last = jnp.cumsum(counts)
    # A group with rows adds at most one tile to those that the rows fill.
    most = -(-num_rows // tile_rows) + min(num_groups, num_rows) - 1
    visit = jnp.minimum(jnp.arange(most, dtype=jnp.int32), jnp.maximum(last[-1] - 1, 0))[:, None]
    is_of_group = (last - counts <= visit) & (visit < last)

    def of_visit(values: jax.Array) -> jax.Array:
        """Selects from [V or 1, X] by a sum [V], which XLA fuses; a lookup would be an operation of its own."""
        return jnp.sum(jnp.where(is_of_group, values, 0), axis=1, dtype=jnp.int32)

    groups = of_visit(jnp.arange(num_groups, dtype=jnp.int32)[None, :])
    first_rows = of_visit(origins + (visit - (last - counts)) * tile_rows)
    return Visits(groups, first_rows, starts, ends, last[-1:])
