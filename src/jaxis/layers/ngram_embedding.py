from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxis.errors import CheckpointError
from jaxis.kernels.materialize import materialize
from jaxis.kernels.weights.block_scaled_weight import decode_e2m1
from jaxis.layers.mapped_table import MappedTable
from jaxis.layers.module import JaxModule
from jaxis.layers.ngram_hash import NgramHash
from jaxis.layers.scope import LayerScope
from jaxis.loading.headers import HeaderTensor

_PART = re.compile(r"(?:ngram_embedding\.)?(?:shard_(\d+)\.)?weight(_scale|_scale_2)?")
_SCALED = 16  # elements of a scale beside packed ones


class NgramEmbedding(JaxModule):
    """Embeddings of n-grams: for each of H hashes of a token's window of ids, a row of one table.

    A checkpoint has the table whole or as shards of consecutive rows, in any float type, `weight_scale`, a factor of
    all rows, if they are fp8, and copies of the hash's numbers. In NVFP4 it has two elements (e2m1) in a byte, and
    `weight_scale` for every 16 of them, with `weight_scale_2` as the factor.

    Args:
      num_rows: Rows of the table, padding included.
      width: Elements of a row.
      stored: Numbers of the hash that a checkpoint may have -> their values.
    """

    def __init__(
        self, scope: LayerScope, hashes: NgramHash, num_rows: int, width: int, stored: Mapping[str, tuple[int, ...]]
    ) -> None:
        self.hashes, self.dtype = hashes, scope.dtype
        self.table = MappedTable(num_rows, width)
        self.block_scales: MappedTable | None = None
        self.scale = nnx.Variable(jnp.ones((), jnp.float32))
        self._stored = tuple(stored.items())
        self._width = width
        self._factor: float | None = None

    def __call__(self, window: jax.Array) -> jax.Array:
        """Returns [T, H * width] for a window i32 [T, n] of ids, the token's own first."""
        ids = self.hashes(window)
        rows = self.table(ids)
        if self.block_scales is not None:
            scales = self.block_scales(ids).astype(jnp.float32)
            rows = decode_e2m1(rows) * jnp.repeat(scales, _SCALED, axis=-1)
        rows = rows.astype(jnp.float32)
        rows = materialize(rows * self.scale[...]) if self.table.row_dtype.itemsize == 1 else rows
        return rows.reshape(window.shape[0], -1).astype(self.dtype)

    def load_weights(self, weights: Iterable[tuple[str, np.ndarray]]) -> Iterator[str]:
        """Takes the table's parts and yields the names of what it read. Raises CheckpointError if something differs."""
        stored = dict(self._stored)
        for name, tensor in weights:
            if name in stored:
                if not isinstance(tensor, HeaderTensor) and tuple(tensor.tolist()) != stored[name]:
                    raise CheckpointError(
                        f"{name} is {tensor.tolist()} in the checkpoint, but {list(stored[name])} by config.json"
                    )
            elif (match := _PART.fullmatch(name)) is None:
                raise CheckpointError(f"{name} {list(tensor.shape)} is no part of a table of n-grams")
            elif match[2] is None:
                self._take_rows(int(match[1] or 0), tensor)
            elif tensor.size == 1:
                self._set_factor(name, float(np.asarray(tensor, np.float32).reshape(())))
            else:
                if self.block_scales is None:
                    self.block_scales = MappedTable(self.table.num_rows, self._width // _SCALED)
                self.block_scales.take(int(match[1] or 0), tensor)
            yield name

    def _take_rows(self, number: int, rows: np.ndarray) -> None:
        if rows.dtype == np.uint8 and not self.table.has_parts:
            self.table = MappedTable(self.table.num_rows, self._width // 2)
        self.table.take(number, rows)

    def _set_factor(self, name: str, factor: float) -> None:
        """Sets the factor of all rows, which each shard may have. Raises CheckpointError if they differ."""
        if self._factor not in (None, factor):
            raise CheckpointError(f"{name} is {factor}, but another part of the table of n-grams has {self._factor}")
        self._factor = factor
        self.scale.set_value(jnp.asarray(factor, jnp.float32))

    def after_loading(self) -> None:
        self._factor = None
        if not self.table.has_parts:
            return
        if (self.table.row_dtype == np.uint8) != (self.block_scales is not None):
            raise CheckpointError("the table of n-grams has packed elements without scales, or scales without those")
        try:
            self.table.finish()
            if self.block_scales is not None:
                self.block_scales.finish()
        except CheckpointError as error:
            raise CheckpointError(f"the table of n-grams {error}") from None
