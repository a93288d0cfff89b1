"""Packs the sampling parameters of each step: into vectors that are kept, since of long histories little is new."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxis.engine.execution.sampling_batch import SamplerFeatures, SamplingArrays, SamplingBatch
from jaxis.engine.execution.token_history import HistoryRows

# Kinds of steps whose vectors are kept: those of decodes alone, and those with a prefill.
MAX_KINDS = 2
# While a step's vector is written, devices may still read that of the step before, and other hosts be sent what differs
# from it. The step before that was read.
VECTORS_OF_A_KIND = 2


class SamplingPacker:
    """Packs steps, whose tokens are read before the one after the next is packed.

    Args:
      vocab_size: V.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        # The kind used last is the last one, as is the vector written last of each.
        self._vectors: dict[tuple[int, int, SamplerFeatures], list[_Vector]] = {}

    def pack(self, batches: Sequence[SamplingBatch], num_rows: int, features: SamplerFeatures) -> np.ndarray:
        """A step's parameters as one int32 vector, floats by their bits, each rank's behind the last one's.

        Args:
          batches: Of each data rank.
          num_rows: R of each.
          features: Those that the batches need, or more.

        Returns:
          The inverse of `SamplingArrays.unpack`, rank by rank; to be read until the step after the next is packed.
        """
        kind = len(batches), num_rows, features
        vectors = self._vectors.pop(kind, [])
        vector = vectors.pop(0) if len(vectors) == VECTORS_OF_A_KIND else _Vector(*kind, self._vocab_size)
        self._vectors[kind] = [*vectors, vector]
        if len(self._vectors) > MAX_KINDS:
            del self._vectors[next(iter(self._vectors))]
        vector.write(batches)
        return vector.packed


class _Vector:
    """A vector, and what it holds."""

    def __init__(self, num_ranks: int, num_rows: int, features: SamplerFeatures, vocab_size: int) -> None:
        size = SamplingArrays.packed_size(num_rows, features)
        self.packed = np.empty(num_ranks * size, np.int32)
        self._arrays = [SamplingArrays.views(part, num_rows, features) for part in self.packed.reshape(num_ranks, -1)]
        self._histories = [HistoryRows(each.history_ids, each.history_counts, vocab_size) for each in self._arrays]
        self._padding = {"bias_ids": vocab_size, "bias": 0.0, "allowed_ids": vocab_size, "token_mask": -1}

    def write(self, batches: Sequence[SamplingBatch]) -> None:
        for batch, arrays, histories in zip(batches, self._arrays, self._histories, strict=True):
            for name, field, value in zip(arrays._fields, arrays, batch.arrays, strict=True):
                if name in self._padding:
                    field[:, : value.shape[1]] = value
                    field[:, value.shape[1] :] = self._padding[name]
                elif name not in ("history_ids", "history_counts"):
                    field[:] = value
            for row, (history, drafts) in enumerate(batch.histories):
                histories.write(row, history, drafts)
            histories.clear_from(len(batch.histories))
