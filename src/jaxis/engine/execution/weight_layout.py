"""Puts weights in memory row by row, the layout that lookups and kernels read.

On TPU the default layout of an array is the one that pads it least: a table of embeddings whose rows are no multiple of
128 lies column by column, and so does a stack of experts whose share on a device has such rows. A program that looks up
rows, or calls a Pallas kernel, would then turn all of it around in every step.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout

Array = TypeVar("Array", jax.Array, jax.ShapeDtypeStruct)


def row_major(array: Array) -> Array:
    """The array with its last axis innermost; moved, and its old buffer freed, if it lies otherwise."""
    if array.ndim < 2 or jnp.issubdtype(array.dtype, jax.dtypes.extended):
        return array
    rows = Layout(major_to_minor=tuple(range(array.ndim)))
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=Format(rows, array.sharding))
    layout = cast(Any, array).format.layout
    if layout is None or layout.major_to_minor == rows.major_to_minor:
        return array
    return jax.device_put(array, Format(rows, array.sharding), donate=True)
