"""The packing of each step's sampling parameters into vectors that are kept, since little of a long history is new."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxis.engine.execution.sampling_batch import SamplerFeatures, SamplingArrays, SamplingBatch
from jaxis.engine.execution.token_history import HistoryRows

# Number of kinds of steps whose vectors are kept: steps of decodes alone, and steps with a prefill.
MAX_KINDS = 2


class SamplingPacker:
    """Packs the sampling parameters of steps.

    While a step's vector is written, devices may still read the vectors of the steps in flight, and their differences
    may still be sent to other hosts. So each step in flight has a vector of its own. `num_unread` is the most steps
    whose tokens were not read yet when another step is packed.
    """

    def __init__(self, vocab_size: int, num_unread: int = 1) -> None:
        self._vocab_size, self._num_unread = vocab_size, num_unread
        # Ordered by use: the kind used last, and each kind's vector written last, come last.
        self._vectors: dict[tuple[int, int, SamplerFeatures], list[_Vector]] = {}

    def pack(self, batches: Sequence[SamplingBatch], num_rows: int, features: SamplerFeatures) -> np.ndarray:
        """Packs the ranks' batches, R rows each, into one int32 vector, floats by their bits, rank after rank.

        `features` are those that the batches need, or more. `SamplingArrays.unpack` reads the vector, rank by rank. It
        is overwritten once `num_unread` other steps were packed.
        """
        kind = len(batches), num_rows, features
        vectors = self._vectors.pop(kind, [])
        vector = vectors.pop(0) if len(vectors) > self._num_unread else _Vector(*kind, self._vocab_size)
        self._vectors[kind] = [*vectors, vector]
        if len(self._vectors) > MAX_KINDS:
            del self._vectors[next(iter(self._vectors))]
        vector.write(batches)
        return vector.packed


class _Vector:
    def __init__(self, num_ranks: int, num_rows: int, features: SamplerFeatures, vocab_size: int) -> None:
        size = SamplingArrays.packed_size(num_rows, features)
        self.packed = np.empty(num_ranks * size, np.int32)
        self._arrays = [SamplingArrays.views(part, num_rows, features) for part in self.packed.reshape(num_ranks, -1)]
        self._histories = [HistoryRows(each.history_ids, each.history_counts, vocab_size) for each in self._arrays]
        self._padding = {"bias_ids": vocab_size, "bias": 0.0, "allowed_ids": vocab_size, "token_mask": -1}
        self._padding |= {"logprobs_mode": 0, "favored_ids": vocab_size}

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
