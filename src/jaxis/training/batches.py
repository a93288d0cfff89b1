"""Batches: each is a pure function of the examples, the seed and the step's number."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jaxis.training.examples import Example
from jaxis.training.mixture import Mixture
from jaxis.training.packing import pack

MIN_ROW_TOKENS = 64


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainingBatch:
    """M micro-batches of B batch rows of L tokens. A batch row holds up to R sequences, then padding.

    Attributes:
      ids: int32 [M, B, L].
      targets: int32 [M, B, L], the token that follows each token.
      learned: bool [M, B, L], True where the target is learned.
      positions: int32 [M, B, L], position of each token in its sequence.
      seq_lens: int32 [M, B, R].
      query_start_loc: int32 [M, B, R + 1]; sequence r has the tokens from element r up to element r + 1.
      num_sequences: int32 [M, B].
      number: int32 [M, B], index of each batch row in its micro-batch.
    """

    ids: np.ndarray | jax.Array
    targets: np.ndarray | jax.Array
    learned: np.ndarray | jax.Array
    positions: np.ndarray | jax.Array
    seq_lens: np.ndarray | jax.Array
    query_start_loc: np.ndarray | jax.Array
    num_sequences: np.ndarray | jax.Array
    number: np.ndarray | jax.Array


@dataclass(frozen=True)
class BatchShape:
    """Size of a step's batch.

    Attributes:
      num_micro_batches: M; micro-batches are computed one after the other.
      num_items: Items of a micro-batch, computed together. An item is a batch row or a pair of batch rows.
      max_tokens: Length of the longest batch row in tokens.
    """

    num_micro_batches: int
    num_items: int
    max_tokens: int

    @property
    def num_items_of_step(self) -> int:
        return self.num_micro_batches * self.num_items


class Batches:
    """The batches of training.

    Args:
      items: Examples. An item of two is a pair; the two halves of a micro-batch hold the two sides of its pairs.
      seed: Seed of the order of items, which differs in each epoch; None keeps the given order.
      packs: True if examples share batch rows; not supported for pairs or a mixture.
      mixture: Choice of the items of an epoch; None: all items.
    """

    def __init__(
        self,
        items: Sequence[tuple[Example, ...]],
        shape: BatchShape,
        *,
        seed: int | None,
        packs: bool = False,
        mixture: Mixture | None = None,
    ) -> None:
        self._items, self._shape, self._seed, self._packs, self._mixture = items, shape, seed, packs, mixture
        self.rows_per_item = len(items[0])
        self._lengths = [max(len(example.ids) for example in item) for item in items]
        self._num_units = len(self._units(0)) if packs or mixture else len(items)

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps that use every item (or the mixture's items) once; the last step may be smaller."""
        return -(-self._num_units // self._shape.num_items_of_step)

    def batch(self, step: int) -> TrainingBatch:
        """Returns the batch of a step, from 0."""
        epoch, place = divmod(step, self.steps_per_epoch)
        size = self._shape.num_items_of_step
        return self._assemble(self._units(epoch)[place * size : (place + 1) * size])

    def longest(self) -> TrainingBatch:
        """Returns a batch of the longest batch row and padding."""
        return self._assemble([max(self._units(0), key=lambda unit: sum(self._lengths[i] for i in unit))])

    @functools.lru_cache(maxsize=2)  # noqa: B019 - holds the two epochs around a step
    def _units(self, epoch: int) -> list[list[int]]:
        """Returns the items of each batch row, in the order of an epoch."""
        if self._mixture is not None:
            return [[i] for i in self._mixture.epoch(epoch).tolist()]
        order = np.arange(len(self._items))
        if self._seed is not None:
            # NumPy guarantees the stream of this generator, whatever its version.
            order = np.random.RandomState([self._seed, epoch]).permutation(len(self._items))
        if not self._packs:
            return [[i] for i in order.tolist()]
        rows = pack(self._lengths, self._shape.max_tokens, order.tolist())
        if self._seed is None:
            return rows
        return [rows[i] for i in np.random.RandomState([self._seed, epoch, 1]).permutation(len(rows)).tolist()]

    def _assemble(self, units: Sequence[Sequence[int]]) -> TrainingBatch:
        shape, of_item = self._shape, self.rows_per_item
        longest = max(sum(self._lengths[i] for i in unit) for unit in units)
        num_tokens = shape.max_tokens if self._packs else _rounded_up(longest, MIN_ROW_TOKENS, shape.max_tokens)
        num_sequences = _rounded_up(max(map(len, units)), 1, shape.max_tokens)
        # Fewer micro-batches for the last step of an epoch would need one more program.
        of_micro_batch = shape.num_items * of_item
        rows = [
            _Row(num_tokens, num_sequences, number)
            for _ in range(shape.num_micro_batches)
            for number in range(of_micro_batch)
        ]
        for number, unit in enumerate(units):
            micro_batch, item = divmod(number, shape.num_items)
            for half in range(of_item):
                row = rows[(micro_batch * of_item + half) * shape.num_items + item]
                for i in unit:
                    row.add(self._items[i][half])
        leading = (shape.num_micro_batches, of_micro_batch)
        arrays = {
            name: np.stack([getattr(row, name) for row in rows]).reshape(*leading, *np.shape(getattr(rows[0], name)))
            for name in TrainingBatch.__dataclass_fields__
        }
        return TrainingBatch(**arrays)


class _Row:
    """A batch row while it is filled; attributes as in `TrainingBatch`."""

    def __init__(self, num_tokens: int, num_sequences: int, number: int) -> None:
        self.ids = np.zeros(num_tokens, np.int32)
        self.targets = np.zeros(num_tokens, np.int32)
        self.learned = np.zeros(num_tokens, bool)
        self.positions = np.zeros(num_tokens, np.int32)
        self.seq_lens = np.zeros(num_sequences, np.int32)
        self.query_start_loc = np.zeros(num_sequences + 1, np.int32)
        self.num_sequences = np.int32(0)
        self.number = np.int32(number)

    def add(self, example: Example) -> None:
        number, length = int(self.num_sequences), len(example.ids)
        start = int(self.query_start_loc[number])
        end = start + length
        self.ids[start:end] = example.ids
        self.targets[start : end - 1] = example.ids[1:]
        self.learned[start : end - 1] = example.learned[1:]
        self.positions[start:end] = np.arange(length)
        self.seq_lens[number] = length
        self.query_start_loc[number + 1 :] = end
        self.num_sequences = np.int32(number + 1)


def _rounded_up(size: int, least: int, most: int) -> int:
    """Rounds up to a power of two, so that few sizes occur; at most `most`."""
    power = least
    while power < size:
        power *= 2
    return min(power, most)
