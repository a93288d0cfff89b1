from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxis.errors import CheckpointError
from jaxis.kernels.materialize import materialize
from jaxis.layers.mapped_table import MappedTable
from jaxis.layers.module import JaxModule
from jaxis.layers.ngram_hash import NgramHash
from jaxis.layers.scope import LayerScope
from jaxis.loading.headers import HeaderTensor

_SHARD = re.compile(r"ngram_embedding\.(?:shard_(\d+)\.)?weight")


class NgramEmbedding(JaxModule):
    """Embeddings of n-grams: for each of H hashes of a token's window of ids, a row of one table.

    A checkpoint has the table whole or as shards of consecutive rows, in any float type, `weight_scale`, a factor of
    all rows, if they are fp8, and copies of the hash's numbers.

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
        self.scale = nnx.Variable(jnp.ones((), jnp.float32))
        self._stored = tuple(stored.items())

    def __call__(self, window: jax.Array) -> jax.Array:
        """Returns [T, H * width] for a window i32 [T, n] of ids, the token's own first."""
        rows = self.table(self.hashes(window)).astype(jnp.float32)
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
            elif name == "ngram_embedding.weight_scale" and tensor.size == 1:
                self.scale.set_value(jnp.asarray(np.asarray(tensor, np.float32).reshape(())))
            elif (match := _SHARD.fullmatch(name)) is not None:
                self.table.take(int(match[1] or 0), tensor)
            else:
                raise CheckpointError(f"{name} {list(tensor.shape)} is no part of a table of n-grams")
            yield name

    def after_loading(self) -> None:
        if self.table.has_parts:
            try:
                self.table.finish()
            except CheckpointError as error:
                raise CheckpointError(f"the table of n-grams {error}") from None
