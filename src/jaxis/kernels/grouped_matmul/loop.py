"""Grouped products as loops over blocks of rows, which read the weights of groups with rows only."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

Weight = TypeVar("Weight")
Product = Callable[[jax.Array, Weight], jax.Array]

_FEWEST_ROWS, _MOST_ROWS = 8, 256  # of a block


class _Blocks(NamedTuple):
    """Blocks of `size` adjacent rows; a group's last block may have rows of later groups, too.

    Attributes:
      size: Rows of a block.
      ends: i32 [X], one past each group's last block.
      counts: i32 [X], number of each group's blocks.
      first_rows, end_rows: i32 [X], first row of each group, and one past its last.
    """

    size: int
    ends: jax.Array
    counts: jax.Array
    first_rows: jax.Array
    end_rows: jax.Array

    @classmethod
    def of(cls, num_rows: int, group_sizes: jax.Array) -> _Blocks:
        size = _block_rows(num_rows, len(group_sizes))
        counts, end_rows = jnp.asarray(-(-group_sizes // size)), jnp.cumsum(group_sizes)
        return cls(size, jnp.cumsum(counts), counts, end_rows - group_sizes, end_rows)

    def place(self, block: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the group and the first row of a block."""
        group = jnp.sum(self.ends <= block)
        number = block - (self.ends[group] - self.counts[group])
        return group, self.first_rows[group] + number * self.size


def grouped_matmul(multiply: Product[Weight], x: jax.Array, weight: Weight, group_sizes: jax.Array) -> jax.Array:
    """Computes `reference.grouped_matmul` for any type of weight, a pytree of arrays [X, ...].

    `multiply` maps rows [B, in] and the weight of one group to [B, out]. x is [N, in], sorted by group, group_sizes i32
    [X].
    """
    num_rows, blocks = len(x), _Blocks.of(len(x), group_sizes)
    x = jnp.pad(x, ((0, blocks.size), (0, 0)))

    def product_of(block: jax.Array) -> tuple[jax.Array, jax.Array]:
        group, first = blocks.place(block)
        of_group = jax.tree.map(lambda array: jax.lax.dynamic_index_in_dim(array, group, keepdims=False), weight)
        return multiply(jax.lax.dynamic_slice_in_dim(x, first, blocks.size), of_group), first

    def step(block: jax.Array, out: jax.Array) -> jax.Array:
        # A group's last block may overlap the next group's rows, whose own blocks come later and overwrite it.
        return jax.lax.dynamic_update_slice_in_dim(out, *product_of(block), axis=0)

    one = jax.eval_shape(lambda: product_of(jnp.int32(0))[0])
    out = jax.lax.fori_loop(0, blocks.ends[-1], step, jnp.zeros((len(x), one.shape[1]), one.dtype))
    is_in_group = jnp.arange(num_rows) < blocks.end_rows[-1]
    return jnp.where(is_in_group[:, None], out[:num_rows], 0)


def grouped_outer(y: jax.Array, x: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Returns `y[rows of group g].T @ x[rows of group g]` for each group g, float32 [X, out, in].

    y is [N, out] and x [N, in], sorted by group; group_sizes i32 [X].
    """
    blocks = _Blocks.of(len(x), group_sizes)
    y, x = (jnp.pad(each, ((0, blocks.size), (0, 0))) for each in (y, x))

    def step(block: jax.Array, out: jax.Array) -> jax.Array:
        group, first = blocks.place(block)
        of_y, of_x = (jax.lax.dynamic_slice_in_dim(each, first, blocks.size) for each in (y, x))
        is_in_group = first + jnp.arange(blocks.size) < blocks.end_rows[group]
        of_y = jnp.where(is_in_group[:, None], of_y, 0)
        product = jnp.einsum("bo,bi->oi", of_y, of_x, preferred_element_type=jnp.float32)
        so_far = jax.lax.dynamic_index_in_dim(out, group, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(out, so_far + product, group, 0)

    zeros = jnp.zeros((len(group_sizes), y.shape[1], x.shape[1]), jnp.float32)
    return jax.lax.fori_loop(0, blocks.ends[-1], step, zeros)


def _block_rows(num_rows: int, num_groups: int) -> int:
    """Returns a power of two, about twice a group's average of rows, so that most groups fit in one block."""
    wanted = max(_FEWEST_ROWS, min(_MOST_ROWS, 2 * num_rows // num_groups, num_rows))
    return 1 << (wanted - 1).bit_length()
