"""Batches: each is a pure function of the examples, the seed and the step's number.

An epoch has the examples in a random order, packed into batch rows, or in a mixture's proportions.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.training.examples import Example

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

    def arrays(self) -> dict[str, np.ndarray | jax.Array]:
        """Returns the arrays above by name, without those of a subclass."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(TrainingBatch)}

    def joined(self) -> tuple[TrainingBatch, jax.Array]:
        """Joins the batch rows of one micro-batch to one without padding between them.

        Returns the row, and the place in it of each token of the batch, int32 [B * L].
        """
        is_sequence = jnp.arange(self.seq_lens.shape[1]) < jnp.asarray(self.num_sequences)[:, None]
        sequences = jnp.argsort(~is_sequence.reshape(-1), stable=True)
        seq_lens = jnp.where(is_sequence, self.seq_lens, 0)
        is_token = jnp.arange(self.ids.shape[1]) < jnp.sum(seq_lens, axis=1)[:, None]
        tokens = jnp.argsort(~is_token.reshape(-1), stable=True)
        ids, targets, learned, positions = (
            jnp.asarray(each).reshape(-1)[tokens] for each in (self.ids, self.targets, self.learned, self.positions)
        )
        seq_lens = seq_lens.reshape(-1)[sequences]
        ends = jnp.cumsum(seq_lens, dtype=jnp.int32)
        starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
        count, number = jnp.sum(jnp.asarray(self.num_sequences)), jnp.asarray(self.number)[0]
        row = TrainingBatch(ids, targets, learned, positions, seq_lens, starts, count, number)
        return row, jnp.argsort(tokens)


@dataclass(frozen=True)
class BatchShape:
    """Size of a step's batch.

    Attributes:
      num_micro_batches: M; micro-batches are computed one after the other.
      num_rows: Batch rows of a micro-batch, or pairs of them, which are computed together.
      max_tokens: Length of the longest batch row in tokens.
    """

    num_micro_batches: int
    num_rows: int
    max_tokens: int


class Batches:
    """The batches of training.

    Args:
      examples: Examples, alone or as pairs; the two halves of a micro-batch hold the two sides of its pairs.
      seed: Seed of the order of examples, which differs in each epoch; None keeps the given order.
      packs: True if examples share batch rows; not supported for pairs or a mixture.
      mixture: Choice of the examples of an epoch; None: all of them.
      own_rows: Batch rows of a micro-batch, or pairs, that this process computes; others stay empty. None: all.

    Attributes:
      num_sides: 2 for pairs, else 1.
    """

    def __init__(
        self,
        examples: Sequence[tuple[Example, ...]],
        shape: BatchShape,
        *,
        seed: int | None,
        packs: bool = False,
        mixture: Mixture | None = None,
        own_rows: Collection[int] | None = None,
    ) -> None:
        self._examples, self._shape, self._seed, self._packs, self._mixture = examples, shape, seed, packs, mixture
        self.num_sides = len(examples[0])
        self._own_rows = range(shape.num_rows) if own_rows is None else own_rows
        self._lengths = [max(len(side.ids) for side in example) for example in examples]
        self._num_rows = len(self._rows(0)) if packs or mixture else len(examples)
        self._rows_per_step = shape.num_micro_batches * shape.num_rows

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps that use every example (or the mixture's examples) once; the last step may be smaller."""
        return -(-self._num_rows // self._rows_per_step)

    def batch(self, step: int) -> TrainingBatch:
        """Returns the batch of a step, from 0."""
        return self._assemble(self.rows(step))

    def rows(self, step: int) -> list[list[int]]:
        """Returns the indices of the examples of each batch row of a step."""
        epoch, place = divmod(step, self.steps_per_epoch)
        size = self._rows_per_step
        return self._rows(epoch)[place * size : (place + 1) * size]

    def longest(self) -> TrainingBatch:
        """Returns a batch of the longest batch row and padding."""
        return self._assemble([max(self._rows(0), key=lambda row: sum(self._lengths[i] for i in row))])

    @functools.lru_cache(maxsize=2)  # noqa: B019 - holds the two epochs around a step
    def _rows(self, epoch: int) -> list[list[int]]:
        """Returns the indices of the examples of each batch row, in the order of an epoch."""
        if self._mixture is not None:
            return [[i] for i in self._mixture.epoch(epoch).tolist()]
        order = list(range(len(self._examples)))
        if self._seed is not None:
            order = permutation(len(order), self._seed, epoch).tolist()
        if not self._packs:
            return [[i] for i in order]
        rows = pack(self._lengths, self._shape.max_tokens, order)
        if self._seed is None:
            return rows
        return [rows[i] for i in permutation(len(rows), self._seed, epoch, 1).tolist()]

    def _assemble(self, examples: Sequence[Sequence[int]]) -> TrainingBatch:
        """Returns the batch of these batch rows, each given by its examples."""
        shape = self._shape
        longest = max(sum(self._lengths[i] for i in row) for row in examples)
        num_tokens = shape.max_tokens if self._packs else rounded_up(longest, MIN_ROW_TOKENS, shape.max_tokens)
        num_sequences = rounded_up(max(map(len, examples)), 1, shape.max_tokens)
        rows = [
            [self._examples[i] for i in row] if number % shape.num_rows in self._own_rows else []
            for number, row in enumerate(examples)
        ]
        return fill(rows, shape, self.num_sides, num_tokens, num_sequences)


def fill(
    examples: Sequence[Sequence[tuple[Example, ...]]],
    shape: BatchShape,
    num_sides: int,
    num_tokens: int,
    num_sequences: int,
) -> TrainingBatch:
    """Makes a batch of batch rows, each given by its examples, or pairs of them; the rest of the shape stays empty."""
    # Fewer micro-batches for the last step of an epoch would need one more program.
    of_micro_batch = shape.num_rows * num_sides
    rows = [
        _Row(num_tokens, num_sequences, number)
        for _ in range(shape.num_micro_batches)
        for number in range(of_micro_batch)
    ]
    for number, of_row in enumerate(examples):
        micro_batch, place = divmod(number, shape.num_rows)
        for example in of_row:
            for side, each in enumerate(example):
                rows[(micro_batch * num_sides + side) * shape.num_rows + place].add(each)
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


def rounded_up(size: int, least: int, most: int) -> int:
    """Rounds up to a power of two, so that few sizes occur; at most `most`."""
    power = least
    while power < size:
        power *= 2
    return min(power, most)


def pack(lengths: Sequence[int], capacity: int, order: Sequence[int]) -> list[list[int]]:
    """Packs by best-fit decreasing: the longest example first, each into the fullest batch row that it fits into.

    Returns the indices of the examples of each batch row of `capacity` tokens. The number of batch rows and their
    lengths do not depend on `order`, a permutation that decides among equally long examples. Raises ValueError if an
    example is longer than a batch row.
    """
    rows: list[list[int]] = []
    of_room: dict[int, list[int]] = {}  # number of free tokens -> batch rows
    rooms: list[int] = []  # keys of of_room, sorted
    for index in sorted(order, key=lambda i: -lengths[i]):
        length = lengths[index]
        if length > capacity:
            raise ValueError(f"an example of {length} tokens does not fit into a row of {capacity}")
        place = bisect.bisect_left(rooms, length)
        if place == len(rooms):
            room, row = capacity, len(rows)
            rows.append([])
        else:
            room = rooms[place]
            row = of_room[room].pop()
            if not of_room[room]:
                del of_room[room], rooms[place]
        rows[row].append(index)
        left = room - length
        if left not in of_room:
            of_room[left] = []
            bisect.insort(rooms, left)
        of_room[left].append(row)
    return rows


class Mixture:
    """Examples of several data sets, numbered one set after the other, in given proportions.

    Every epoch, a pure function of its number, has the same number of examples of each data set. Those that were not
    used in one epoch are used in the next: none is repeated before all others of its data set were used.

    Args:
      sizes: Number of examples of each data set.
      proportions: Share of each data set in an epoch; they add up to 1.
      stops_at_first: True if an epoch ends before the first data set is exhausted; False if it ends when the last one
        is, where the others begin again.
      seed: Seed of the order.
    """

    def __init__(self, sizes: Sequence[int], proportions: Sequence[float], *, stops_at_first: bool, seed: int) -> None:
        self._sizes, self._seed = sizes, seed
        totals = [size / share for size, share in zip(sizes, proportions, strict=True)]
        total = max(1, math.floor(min(totals) + 1e-9)) if stops_at_first else math.ceil(max(totals) - 1e-9)
        # Largest remainders: whole numbers that add up to the total.
        exact = [total * share for share in proportions]
        self.counts = [math.floor(each + 1e-9) for each in exact]
        by_remainder = sorted(range(len(exact)), key=lambda i: self.counts[i] - exact[i])
        for i in by_remainder[: total - sum(self.counts)]:
            self.counts[i] += 1

    def epoch(self, number: int) -> np.ndarray:
        """Returns the indices of an epoch's examples, in order: int64 [N]."""
        drawn: list[np.ndarray] = []
        first = 0
        for dataset, (size, count) in enumerate(zip(self._sizes, self.counts, strict=True)):
            begin, end = number * count, (number + 1) * count
            for cycle in range(begin // size, -(-end // size)):
                order = permutation(size, self._seed, dataset, cycle)
                drawn.append(first + order[max(begin - cycle * size, 0) : end - cycle * size])
            first += size
        return np.concatenate(drawn)[permutation(sum(self.counts), self._seed, len(self._sizes), number)]


def permutation(size: int, *seed: int) -> np.ndarray:
    # NumPy guarantees the stream of this generator, whatever its version.
    return np.random.RandomState(list(seed)).permutation(size)
