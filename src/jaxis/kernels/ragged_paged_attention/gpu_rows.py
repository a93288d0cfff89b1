"""Rows of arrays inside Triton kernels. An array may have any size, while those of a kernel are powers of two."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

# The fewest rows and columns of matrices that tensor cores multiply.
MIN_DOT_SIZE = 16


def padded_size(size: int) -> int:
    """Returns the size of an axis that holds `size` elements in a kernel, where sizes are powers of two."""
    return max(MIN_DOT_SIZE, pl.next_power_of_2(size))


def load(ref: Any, indices: tuple[Any, ...], mask: jax.Array, other: float = 0) -> jax.Array:
    return plgpu.load(ref.at[indices], mask=mask, other=other)


def store(ref: Any, indices: tuple[Any, ...], values: jax.Array, mask: jax.Array) -> None:
    plgpu.store(ref.at[indices], values.astype(ref.dtype), mask=mask)


def read_rows(
    ref: Any, indices: tuple[Any, ...], part: tuple[int, int], exists: jax.Array, width: int | None = None
) -> jax.Array:
    """Reads part (offset, size) of the last axis at N indices: [N, width], 0 in padding and where not `exists`."""
    offset, size = part
    width = width or padded_size(size)
    column = jnp.arange(width, dtype=jnp.int32)
    mask = exists[:, None] if size == width else exists[:, None] & (column < size)[None, :]
    return load(ref, _rows(indices, offset + column), mask)


def write_rows(ref: Any, indices: tuple[Any, ...], size: int, exists: jax.Array, rows: jax.Array) -> None:
    """Writes the first `size` columns of rows [N, padded size] at N indices, where they exist."""
    column = jnp.arange(rows.shape[1], dtype=jnp.int32)
    plgpu.store(ref.at[_rows(indices, column)], rows.astype(ref.dtype), mask=exists[:, None] & (column < size)[None, :])


def _rows(indices: tuple[Any, ...], column: jax.Array) -> tuple[Any, ...]:
    return (*(i[:, None] if jnp.ndim(i) else i for i in indices), column[None, :])
