"""The memory layout of weights that lookups and kernels read: elements row by row, scales column by column.

On TPU the default layout of an array is the one that pads it least. A table of embeddings whose rows are no multiple of
128 lies column by column, and so does a stack of experts whose share on a device has such rows. A program that looks up
rows, or calls a Pallas kernel, would then turn all of it around in every step.

Scales, [..., out, groups], have short rows, which would be padded to 128 groups; the kernels read them by outputs.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout

from jaxis.kernels.weights import Weight, as_weight

Array = TypeVar("Array", jax.Array, jax.ShapeDtypeStruct)


def laid_out(state: Any) -> Any:
    """Returns a model's arrays and weights in the layouts that programs for TPUs read; old buffers are freed."""
    return jax.tree.map(_laid_out, state, is_leaf=lambda node: isinstance(node, Weight))


def _laid_out(leaf: Any) -> Any:
    by_columns = as_weight(leaf).column_major_arrays

    def moved(path: tuple[Any, ...], array: Any) -> Any:
        return column_major(array) if path and path[-1].name in by_columns else row_major(array)

    return jax.tree_util.tree_map_with_path(moved, leaf)


def row_major(array: Array) -> Array:
    """Returns the array with its last axis innermost; a move frees its old buffer."""
    return _ordered(array, tuple(range(array.ndim)))


def column_major(array: Array) -> Array:
    """Returns the array with its last axis but one innermost; a move frees its old buffer."""
    *leading, rows, columns = range(array.ndim)
    return _ordered(array, (*leading, columns, rows))


def _ordered(array: Array, order: tuple[int, ...]) -> Array:
    if array.ndim < 2 or jnp.issubdtype(array.dtype, jax.dtypes.extended):
        return array
    layout = Layout(major_to_minor=order)
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=Format(layout, array.sharding))
    present = cast(Any, array).format.layout
    if present is None or present.major_to_minor == order:
        return array
    return jax.device_put(array, Format(layout, array.sharding), donate=True)
