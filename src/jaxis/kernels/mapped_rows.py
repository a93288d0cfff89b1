"""Rows of a table that stays in mapped files: a program gets only those that it looks up.

On CPU the native kernel copies them; elsewhere the program asks the host for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.kernels import native

# JAX copies larger operands of a callback on the threads that wait for the callback.
_MAX_IDS_OF_CALLBACK = 16384


@dataclass(frozen=True, eq=False)
class TablePart:
    """Consecutive rows of a table.

    Attributes:
      rows: [N, width], a view of a mapped file, or an array in memory.
      release: Function that lets the pages of a mapped file leave this process; None for an array in memory.
    """

    rows: np.ndarray
    release: Callable[[], None] | None


# Parts by their addresses. They live as long as the process, since programs may have the addresses of any.
_parts: dict[int, TablePart] = {}


def table_operand(parts: Sequence[TablePart]) -> np.ndarray:
    """Returns the table as an operand of programs, uint32 [P, 4].

    Raises ValueError if parts other than the last differ in their number of rows.
    """
    if len({len(part.rows) for part in parts[:-1]} | {max(len(part.rows) for part in parts)}) > 1:
        raise ValueError("the parts of a table, but the last, must have equally many rows")
    operand = np.empty((len(parts), 4), np.uint32)
    for fields, part in zip(operand, parts, strict=True):
        address = part.rows.ctypes.data
        _parts[address] = part
        fields[:] = address & 0xFFFFFFFF, address >> 32, len(part.rows), part.release is not None
    return operand


def mapped_rows(ids: jax.Array, table: jax.Array, width: int, dtype: np.dtype) -> jax.Array:
    """Returns rows [..., width] of a table for ids i32 [...]; ids without a row, and an operand of zeros, give zeros.

    Args:
      ids: Rows to look up.
      table: uint32 [P, 4] from `table_operand`.
      width: Number of elements of a row.
      dtype: Type of the table's elements.
    """
    flat = ids.reshape(-1)
    if native.usable():
        rows = native.call("mapped_rows", jax.ShapeDtypeStruct((flat.size, width), dtype), flat, table)
    else:
        starts = range(0, max(flat.size, 1), _MAX_IDS_OF_CALLBACK)
        calls = [_ask_host(flat[start : start + _MAX_IDS_OF_CALLBACK], table, width, dtype) for start in starts]
        rows = jnp.concatenate(calls)
    return rows.reshape(*ids.shape, width)


def _ask_host(ids: jax.Array, table: jax.Array, width: int, dtype: np.dtype) -> jax.Array:
    def read(ids: np.ndarray, table: np.ndarray) -> np.ndarray:
        return _read(np.asarray(ids), np.asarray(table), width, dtype)

    return jax.pure_callback(read, jax.ShapeDtypeStruct((ids.size, width), dtype), ids, table, vmap_method="sequential")


def _read(ids: np.ndarray, table: np.ndarray, width: int, dtype: np.dtype) -> np.ndarray:
    rows = np.zeros((math.prod(ids.shape), width), dtype)
    part_rows = max(int(table[0, 2]), 1)
    numbers = np.where(ids >= 0, ids // part_rows, -1)
    for number in np.unique(numbers):
        address = int(table[number, 0]) | int(table[number, 1]) << 32 if 0 <= number < len(table) else 0
        if not address:
            continue
        part = _parts[address]
        wanted = ids - number * part_rows
        here = (numbers == number) & (wanted < len(part.rows))
        rows[here] = part.rows[wanted[here]]
        if part.release is not None:
            part.release()
    return rows
