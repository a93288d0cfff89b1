from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


class Mixture:
    """Items of several data sets, numbered one set after the other, in given proportions.

    Every epoch, a pure function of its number, has the same number of items of each data set. Items that were not used
    in one epoch are used in the next: no item is repeated before all other items of its data set were used.

    Args:
      sizes: Number of items of each data set.
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

    @property
    def num_items(self) -> int:
        """Number of items in an epoch."""
        return sum(self.counts)

    def epoch(self, number: int) -> np.ndarray:
        """Returns the items of an epoch in order: int64 [num_items]."""
        drawn: list[np.ndarray] = []
        first = 0
        for dataset, (size, count) in enumerate(zip(self._sizes, self.counts, strict=True)):
            begin, end = number * count, (number + 1) * count
            for cycle in range(begin // size, -(-end // size)):
                order = self._permutation(size, dataset, cycle)
                drawn.append(first + order[max(begin - cycle * size, 0) : end - cycle * size])
            first += size
        return np.concatenate(drawn)[self._permutation(self.num_items, len(self._sizes), number)]

    def _permutation(self, size: int, *of: int) -> np.ndarray:
        # NumPy guarantees the stream of this generator, whatever its version.
        return np.random.RandomState([self._seed, *of]).permutation(size)
