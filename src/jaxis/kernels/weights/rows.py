"""Lookup of rows of a table by their numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.kernels.platform import can_call_kernels, target_platform


def gather_rows(array: jax.Array | np.ndarray, ids: jax.Array) -> jax.Array:
    """Returns `array[ids]` for a table [V, ...] and ids i32 [T]; ids out of range are clipped."""
    if target_platform() == "tpu":
        return _gather_on_tpu(jnp.asarray(array), ids)
    return jnp.take(jnp.asarray(array), ids, axis=0, mode="clip")


def padded_rows(array: jax.Array | np.ndarray, num_rows: int, mode: str = "constant") -> jax.Array | np.ndarray:
    """Pads a table [V, ...] to `num_rows` rows, V or more, with zeros, or with "edge" by its last row."""
    library: Any = np if isinstance(array, np.ndarray) else jnp
    return library.pad(array, [(0, num_rows - array.shape[0])] + [(0, 0)] * (array.ndim - 1), mode=mode)


def _gather_on_tpu(array: jax.Array, ids: jax.Array) -> jax.Array:
    if can_call_kernels():
        # Imported here because Pallas takes long to import.
        from jaxis.kernels.weights import rows_tpu

        if rows_tpu.supports(array, ids):
            return rows_tpu.take_rows(array, ids)
    if len(ids) > 1 or array.dtype.itemsize > 1:
        return jnp.take(array, ids, axis=0, mode="clip")
    # To slice a single row, XLA copies a whole table of bytes into tiles of other sizes; two rows it gathers.
    return jnp.take(array, jnp.pad(ids, (0, 1)), axis=0, mode="clip")[:1]
