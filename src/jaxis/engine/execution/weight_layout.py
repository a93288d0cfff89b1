"""Puts weights in memory in the layout that lookups and kernels read: elements row by row, scales column by column.

On TPU the default layout of an array is the one that pads it least: a table of embeddings whose rows are no multiple of
128 lies column by column, and so does a stack of experts whose share on a device has such rows. A program that looks up
rows, or calls a Pallas kernel, would then turn all of it around in every step.

Scales, [..., out, groups], have short rows, which would be padded to 128 groups; the kernels read them by outputs.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout

from jaxis.kernels.weights import BlockScaledWeight, CodedWeight, QuantizedWeight

Array = TypeVar("Array", jax.Array, jax.ShapeDtypeStruct)
_NARROW = (QuantizedWeight, CodedWeight, BlockScaledWeight)
_ELEMENTS = ("qvalue", "codes", "high", "value")


def laid_out(state: Any) -> Any:
    """The arrays of a model, and its weights, in the layouts that programs for TPUs read; old buffers are freed."""
    return jax.tree.map(_laid_out, state, is_leaf=lambda node: isinstance(node, _NARROW))


def _laid_out(leaf: Any) -> Any:
    if not isinstance(leaf, _NARROW):
        return row_major(leaf)
    # Blocks of several rows have few scales, of which the kernels read whole rows.
    by_rows = isinstance(leaf, BlockScaledWeight) and leaf.block_shape[0] > 1
    arrays = {
        field.name: getattr(leaf, field.name)
        for field in dataclasses.fields(leaf)
        if isinstance(getattr(leaf, field.name), jax.Array | jax.ShapeDtypeStruct)
    }
    moved = {
        name: row_major(array) if by_rows or name in _ELEMENTS else column_major(array)
        for name, array in arrays.items()
    }
    return dataclasses.replace(leaf, **moved)


def row_major(array: Array) -> Array:
    """The array with its last axis innermost; moved, and its old buffer freed, if it lies otherwise."""
    return _ordered(array, tuple(range(array.ndim)))


def column_major(array: Array) -> Array:
    """The array with its last axis but one innermost; moved, and its old buffer freed, if it lies otherwise."""
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
