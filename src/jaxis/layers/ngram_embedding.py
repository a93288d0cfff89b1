from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxis.config.quantization import restored_tensor
from jaxis.errors import CheckpointError
from jaxis.kernels.grouped_matmul.elements import e8m0_to_float32
from jaxis.kernels.materialize import materialize
from jaxis.kernels.weights.block_scaled_weight import decode_e2m1
from jaxis.layers.mapped_table import MappedTable
from jaxis.layers.module import JaxModule
from jaxis.layers.ngram_hash import NgramHash
from jaxis.layers.scope import LayerScope
from jaxis.layers.weight_loader import place_array
from jaxis.loading.headers import HeaderTensor

_PART = re.compile(r"(?:ngram_embedding\.)?(?:shard_(\d+)\.)?weight(_scale|_scale_2|_scale_inv)?")


class NgramEmbedding(JaxModule):
    """Embeddings of n-grams: for each of H hashes of a token's window of ids, a row of one table.

    A checkpoint has the table whole or as shards of consecutive rows, in any float type or packed (two elements, e2m1,
    in a byte), and copies of the hash's numbers. Beside rows in bytes it may have a factor of all (`weight_scale`, or
    `weight_scale_2` beside scales of blocks), and scales [N, width / G] of each G elements: `weight_scale` in fp8, or
    `weight_scale_inv`, which are powers of two (e8m0). A configuration of quantization may restore rows of blocks.

    Args:
      num_rows: Rows of the table, padding included.
      width: Elements of a row.
      stored: Numbers of the hash that a checkpoint may have -> their values.
      read_classes: Function that returns the class i32 [V] of each id, which is hashed in its place, when a table is
        loaded; None: ids are hashed.
    """

    def __init__(
        self,
        scope: LayerScope,
        hashes: NgramHash,
        num_rows: int,
        width: int,
        stored: Mapping[str, tuple[int, ...]],
        *,
        read_classes: Callable[[], np.ndarray] | None = None,
    ) -> None:
        self.hashes, self.dtype, self.width = hashes, scope.dtype, width
        self._quant_config, self._prefix = scope.quant_config, scope.name_in_checkpoint
        # Name of the table whose rows are blocks that the configuration restores; None for other rows.
        self._blocks: str | None = None
        self.table = MappedTable(num_rows, width)
        self.block_scales: MappedTable | None = nnx.data(None)
        self.scale = nnx.Variable(jnp.ones((), jnp.float32))
        self.classes = nnx.Variable(jnp.zeros((1,), jnp.int32))
        self.read_classes = read_classes
        self._stored = tuple(stored.items())
        self._factor: float | None = None

    def __call__(self, window: jax.Array) -> jax.Array:
        """Returns [T, H * width] for a window i32 [T, n] of ids, the token's own first."""
        if self.read_classes is not None:
            window = self.classes[...][window]
        numbers = self.hashes(window)
        rows = self.table(numbers)
        if self._blocks is not None:
            rows = restored_tensor(self._quant_config, self._blocks, rows)
        rows = decode_e2m1(rows) if self._is_packed else rows.astype(jnp.float32)
        if self.block_scales is not None:
            scales = self.block_scales(numbers)
            is_exponent = scales.dtype == jnp.uint8
            scales = e8m0_to_float32(scales) if is_exponent else scales.astype(jnp.float32)
            rows = rows * jnp.repeat(scales, self.width // self.block_scales.width, axis=-1)
        rows = materialize(rows * self.scale[...]) if self.table.row_dtype.itemsize == 1 else rows
        return rows.reshape(window.shape[0], -1).astype(self.dtype)

    @property
    def _is_packed(self) -> bool:
        return self.table.row_dtype == np.uint8 and self._blocks is None

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
                self._take_rows(f"{self._prefix}.{name}".removesuffix(".weight"), int(match[1] or 0), tensor)
            elif tensor.size == 1:
                self._set_factor(name, float(np.asarray(tensor, np.float32).reshape(())))
            elif tensor.ndim != 2 or self.width % tensor.shape[1]:
                raise CheckpointError(f"{name} {list(tensor.shape)} does not fit rows of {self.width} elements")
            else:
                scales = tensor.view(np.uint8) if match[2] == "_scale_inv" else tensor
                if self.block_scales is None:
                    self.block_scales = MappedTable(self.table.num_rows, scales.shape[1])
                self.block_scales.take(int(match[1] or 0), scales)
            yield name

    def _take_rows(self, module: str, number: int, rows: np.ndarray) -> None:
        if rows.dtype == np.uint8 and not self.table.has_parts:
            restored = restored_tensor(self._quant_config, module, HeaderTensor.of(rows.shape, rows.dtype))
            if restored.dtype != np.uint8 and restored.shape[1:] == (self.width,):
                self._blocks = module
            self.table = MappedTable(self.table.num_rows, self.width // 2 if self._blocks is None else rows.shape[1])
        self.table.take(number, rows)
        if self.read_classes is not None and not isinstance(rows, HeaderTensor):
            self.classes.set_value(place_array(self.read_classes(), (None,)))

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
        if self._is_packed and self.block_scales is None:
            raise CheckpointError("the table of n-grams has packed elements without scales")
        if self.block_scales is not None and self.table.row_dtype.itemsize != 1:
            raise CheckpointError(f"the table of n-grams has scales beside elements of {self.table.row_dtype}")
        try:
            for table in filter(None, (self.table, self.block_scales)):
                table.finish()
        except CheckpointError as error:
            raise CheckpointError(f"the table of n-grams {error}") from None
