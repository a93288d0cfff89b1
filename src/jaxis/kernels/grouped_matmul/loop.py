"""The grouped product as a loop over blocks of rows, which reads the weights of groups with rows only."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

Weight = TypeVar("Weight")
Product = Callable[[jax.Array, Weight], jax.Array]

_FEWEST_ROWS, _MOST_ROWS = 8, 256  # of a block


def grouped_matmul(multiply: Product[Weight], x: jax.Array, weight: Weight, group_sizes: jax.Array) -> jax.Array:
    """Computes `reference.grouped_matmul` for any type of weight, a pytree of arrays [X, ...].

    `multiply` maps rows [B, in] and the weight of one group to [B, out]. x is [N, in], sorted by group, group_sizes i32
    [X].
    """
    num_rows, num_groups = len(x), len(group_sizes)
    block_rows = _block_rows(num_rows, num_groups)
    num_blocks = -(-group_sizes // block_rows)
    last_blocks = jnp.cumsum(num_blocks)
    first_rows = jnp.cumsum(group_sizes) - group_sizes
    x = jnp.pad(x, ((0, block_rows), (0, 0)))

    def product_of(block: jax.Array) -> tuple[jax.Array, jax.Array]:
        group = jnp.sum(last_blocks <= block)
        of_group = jax.tree.map(lambda array: jax.lax.dynamic_index_in_dim(array, group, keepdims=False), weight)
        first = first_rows[group] + (block - (last_blocks[group] - num_blocks[group])) * block_rows
        return multiply(jax.lax.dynamic_slice_in_dim(x, first, block_rows), of_group), first

    def step(block: jax.Array, out: jax.Array) -> jax.Array:
        # A group's last block may overlap the next group's rows, whose own blocks come later and overwrite it.
        return jax.lax.dynamic_update_slice_in_dim(out, *product_of(block), axis=0)

    one = jax.eval_shape(lambda: product_of(jnp.int32(0))[0])
    out = jax.lax.fori_loop(0, last_blocks[-1], step, jnp.zeros((len(x), one.shape[1]), one.dtype))
    is_in_group = jnp.arange(num_rows) < group_sizes.sum()
    return jnp.where(is_in_group[:, None], out[:num_rows], 0)


def _block_rows(num_rows: int, num_groups: int) -> int:
    """Returns a power of two, about twice a group's average of rows, so that most groups fit in one block."""
    wanted = max(_FEWEST_ROWS, min(_MOST_ROWS, 2 * num_rows // num_groups, num_rows))
    return 1 << (wanted - 1).bit_length()
