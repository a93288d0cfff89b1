from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxis.errors import CheckpointError
from jaxis.kernels.mapped_rows import TablePart, mapped_rows, table_operand
from jaxis.layers.module import JaxModule
from jaxis.layers.weight_loader import place_array
from jaxis.loading.headers import HeaderTensor
from jaxis.loading.mapped_pages import drop_pages_of, is_mapped, read_at_random


class MappedTable(JaxModule):
    """A table [N, width] that is larger than memory: it stays in the checkpoint's mapped files.

    It is no parameter, because it is neither placed on devices nor quantized nor trained. Without a checkpoint, its
    rows are zeros.

    Attributes:
      row_dtype: Type of the rows; known once a part has been read.
    """

    def __init__(self, num_rows: int, width: int) -> None:
        self.num_rows, self.width = num_rows, width
        self.row_dtype = np.dtype(np.float32)
        self.operand = nnx.Variable(jnp.zeros((1, 4), jnp.uint32))
        self._parts = _Parts()

    def take(self, number: int, rows: np.ndarray) -> None:
        """Takes part `number` of the table: a view [n, width] of a mapped file, or an array that stays in memory.

        Raises CheckpointError if it does not fit the table.
        """
        if rows.ndim != 2 or rows.shape[1] != self.width:
            raise CheckpointError(f"has shape {list(rows.shape)} in the checkpoint, [rows, {self.width}] in the model")
        known = self._parts.by_number
        if known and rows.dtype != self.row_dtype:
            raise CheckpointError(f"is {rows.dtype} in the checkpoint, and another part of the table {self.row_dtype}")
        self.row_dtype = rows.dtype
        if isinstance(rows, HeaderTensor) or not is_mapped(rows):
            known[number] = TablePart(rows, None)
        else:
            read_at_random(rows)
            known[number] = TablePart(rows, functools.partial(drop_pages_of, rows))

    @property
    def has_parts(self) -> bool:
        return bool(self._parts.by_number)

    def finish(self) -> None:
        """Makes the parts one table. Raises CheckpointError if some are missing or do not fit each other."""
        parts = [part for _, part in sorted(self._parts.by_number.items())]
        num_rows = sum(len(part.rows) for part in parts)
        if num_rows != self.num_rows or max(self._parts.by_number) >= len(parts):
            raise CheckpointError(
                f"has {num_rows} rows in {len(parts)} parts of the checkpoint, {self.num_rows} in the model"
            )
        if any(isinstance(part.rows, HeaderTensor) for part in parts):
            return
        try:
            operand = table_operand(parts)
        except ValueError as error:
            raise CheckpointError(str(error)) from None
        self.operand.set_value(place_array(operand, (None, None)))

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Returns rows [..., width] in the table's type for ids i32 [...]."""
        return mapped_rows(ids, self.operand[...], self.width, self.row_dtype)


class _Parts:
    """Parts of a table by number; an object of its own, so that a module that holds it can be hashed."""

    def __init__(self) -> None:
        self.by_number: dict[int, TablePart] = {}

    def __reduce__(self) -> tuple[type[_Parts], tuple[()]]:
        # What digests a model, to find its programs, must not read the table: programs have its address as an operand.
        return _Parts, ()
