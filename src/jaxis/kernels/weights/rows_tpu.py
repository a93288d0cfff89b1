"""Lookup of rows of a table on TPU, read from HBM a tile at a time.

If a table fits into VMEM, as a device's part of a vocabulary may, XLA fetches all of it for the few rows of a step.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxis.kernels.hbm import in_hbm

_TILE_BYTES = 32  # of a column of a tile: 8 rows of 4 bytes, 32 of one
_LARGEST_TABLE = 128 << 20  # the largest VMEM; larger tables are gathered from HBM
_FEWEST_COLUMNS = 512  # shorter rows are small, or scales, which lie column by column
_DTYPES = (jnp.float32, jnp.bfloat16, jnp.int8, jnp.uint8)


def supports(table: jax.Array, ids: jax.Array) -> bool:
    """Returns whether the kernel takes these arguments, and reads much less than the whole table."""
    reads = len(ids) * _rows_of_tile(table)
    if table.shape[1] < _FEWEST_COLUMNS:
        return False
    return table.dtype in _DTYPES and table.nbytes <= _LARGEST_TABLE and 0 < 4 * reads <= len(table)


def take_rows(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns `table[ids]`, [T, E], for a table [V, E] that `supports` accepts and ids i32 [T], which are clipped."""
    tile, (num_rows, columns) = _rows_of_tile(table), table.shape
    rows = pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(len(ids),),
            in_specs=[pl.BlockSpec((tile, columns), lambda i, ids: (ids[i] // tile, 0))],
            out_specs=pl.BlockSpec((None, 1, columns), lambda i, _: (i, 0, 0)),
        ),
        out_shape=jax.ShapeDtypeStruct((len(ids), 1, columns), jnp.int32),
        cost_estimate=pl.CostEstimate(
            flops=0, transcendentals=0, bytes_accessed=len(ids) * columns * (_TILE_BYTES + jnp.int32.dtype.itemsize)
        ),
        name="take_rows",
    )(jnp.clip(ids, 0, num_rows - 1), in_hbm(table))
    if not jnp.issubdtype(table.dtype, jnp.floating):
        return rows[:, 0].astype(table.dtype)
    return jax.lax.bitcast_convert_type(rows[:, 0], jnp.float32).astype(table.dtype)


def _kernel(ids: jax.Ref, block: jax.Ref, out: jax.Ref) -> None:
    """Copies one row from block [rows of a tile, E] to out int32 [1, E]; floats as their bits."""
    row = ids[pl.program_id(0)] % block.shape[0]
    values = block[...]
    if jnp.issubdtype(values.dtype, jnp.floating):
        values = jax.lax.bitcast_convert_type(values.astype(jnp.float32), jnp.int32)
    is_wanted = jax.lax.broadcasted_iota(jnp.int32, values.shape, 0) == row
    out[...] = jnp.sum(jnp.where(is_wanted, values.astype(jnp.int32), 0), axis=0, keepdims=True)


def _rows_of_tile(table: jax.Array) -> int:
    return _TILE_BYTES // table.dtype.itemsize
