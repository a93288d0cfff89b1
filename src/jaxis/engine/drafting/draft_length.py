"""How many drafts pay: chances of acceptance against the time that more rows take, both measured."""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from collections.abc import Callable, Sequence

# Of a sequence's earlier steps, each weighs so much of the one after it: texts change.
DECAY = 0.8
# What a sequence's first drafts are taken for: so many guesses, with this chance of being right.
PRIOR_GUESSES, PRIOR_CHANCE = 1.0, 0.75
# The same where it is known what other sequences' drafts are like, and how much each new guess changes that.
TYPICAL_GUESSES, TYPICAL_STEP = 4.0, 0.02
# What each row after the first is taken to add to a step, as a part of the time of a step of one row, until steps of
# the size were measured. Low, so that they are.
ROW_COST = 0.05
# Steps of a size whose median time counts, and after how many steps without one it is taken to be unknown again: it may
# have been measured while the machine was busy.
NUM_TIMES = 9
MAX_AGE = 1000


class TypicalChance:
    """How often drafts of all sequences were right lately.

    Attributes:
      chance: The chance that a draft is right if those before it are.
    """

    def __init__(self) -> None:
        self.chance = PRIOR_CHANCE

    def observe(self, num_guesses: int, num_right: int) -> None:
        """Learns that of so many guesses, `num_right` were right."""
        for guess in range(num_guesses):
            self.chance += TYPICAL_STEP * ((guess < num_right) - self.chance)


class DraftPlace:
    """How often a sequence's drafts are right.

    Attributes:
      max_drafts: Most drafts in a step.

    Args:
      max_drafts: Most drafts in a step.
      typical: Of all sequences, which the first drafts of this one are taken to be like.
    """

    def __init__(self, max_drafts: int, typical: TypicalChance | None = None) -> None:
        self.max_drafts = max_drafts
        self._typical = typical
        self._num_right = self._num_guesses = 0.0

    @property
    def chance(self) -> float:
        """The chance that a draft is right if those before it are."""
        if self._typical is not None:
            return (self._num_right + TYPICAL_GUESSES * self._typical.chance) / (self._num_guesses + TYPICAL_GUESSES)
        return (self._num_right + PRIOR_GUESSES * PRIOR_CHANCE) / (self._num_guesses + PRIOR_GUESSES)

    def observe(self, num_drafts: int, num_right: int) -> None:
        """Learns that of a step's drafts, `num_right` were right before the first wrong one."""
        self._num_right = DECAY * self._num_right + num_right
        num_guesses = num_right + (num_right < num_drafts)
        self._num_guesses = DECAY * self._num_guesses + num_guesses
        if self._typical is not None:
            self._typical.observe(num_guesses, num_right)


class DraftLengths:
    """Chooses, for each step, the number of drafts that gives most tokens in its time.

    Args:
      padded: The number of rows that a step of so many rows is padded to, and takes the time of.
      is_compiled: `is_compiled(num_tokens, starts)`: whether a step of so many rows can run at once; if not, `starts`
        says whether it is going to be compiled.
      max_tokens: Most rows of a step.
      most_drafts: Most drafts of a sequence where so many run; None: as many as each may have.
      compile_seconds: A size of step is compiled once it would have saved so many seconds, which compiling it takes
        from the steps that run meanwhile.
    """

    def __init__(
        self,
        padded: Callable[[int], int],
        is_compiled: Callable[[int, bool], bool],
        max_tokens: int,
        most_drafts: Callable[[int], int] | None = None,
        compile_seconds: float = 0.0,
    ) -> None:
        self._padded, self._is_compiled, self._max_tokens = padded, is_compiled, max_tokens
        self._most_drafts, self._compile_seconds = most_drafts, compile_seconds
        self._saved_if_compiled = 0.0
        self._medians: dict[int, float] = {}
        self._outdated: set[int] = set()
        self._seconds: dict[int, deque[float]] = {}
        self._num_steps = 0
        self._newest_step: dict[int, int] = {}

    @property
    def step_seconds(self) -> dict[int, float]:
        """Median times of the steps that were measured, by their padded number of rows."""
        # Made when they are asked for: most steps are recorded, and nobody asks before the next one.
        for padded in self._outdated:
            self._medians[padded] = statistics.median(self._seconds[padded])
        self._outdated.clear()
        for padded in [p for p, newest in self._newest_step.items() if newest < self._num_steps - MAX_AGE]:
            del self._newest_step[padded], self._seconds[padded]
            self._medians.pop(padded, None)
        return self._medians

    def record(self, num_tokens: int, seconds: float) -> None:
        """Takes in the time of a step without prefills."""
        padded = self._padded(num_tokens)
        self._num_steps += 1
        self._newest_step[padded] = self._num_steps
        if padded in self._seconds:
            self._seconds[padded].append(seconds)
            self._outdated.add(padded)
        else:
            # The first run of a program also sets it up.
            self._seconds[padded] = deque(maxlen=NUM_TIMES)

    def saving(self, num_running: int, num_tokens: int, num_new_tokens: float) -> float:
        """The seconds that a step with drafts saved, by what such steps take; less than 0 if it cost some.

        Args:
          num_running: Sequences in the step, each of which would have got one token without drafts.
          num_tokens: Its rows.
          num_new_tokens: Tokens that it gave.
        """
        if not self.step_seconds:
            return 0.0
        without = self.estimate(num_running)
        return without * num_new_tokens / num_running - self.estimate(num_tokens)

    def prepare(self, place: DraftPlace, num_running: int) -> None:
        """Has compiled what a sequence's first drafts need, whatever it would have saved so far."""
        self._saved_if_compiled = self._compile_seconds
        self.choose([place], num_running)

    def choose(self, places: Sequence[DraftPlace], num_running: int) -> list[int] | None:
        """How many drafts to compute for each of these sequences.

        Args:
          places: Of the sequences that may get drafts.
          num_running: Sequences in the step, these included.

        Returns:
          For each place; all 0 if drafts do not pay. None if they would, once more is compiled.
        """
        most = [place.max_drafts for place in places]
        if self._most_drafts is not None:
            most = [min(of_place, self._most_drafts(num_running)) for of_place in most]
        # A sequence's j-th draft counts if all before it are right, so its chances fall: sorting keeps their order.
        gains = sorted(
            ((place.chance**j, i) for i, place in enumerate(places) for j in range(1, most[i] + 1)),
            key=lambda gain: -gain[0],
        )[: max(self._max_tokens - num_running, 0)]
        expected = list(itertools.accumulate((gain for gain, _ in gains), initial=float(num_running)))
        counts, num_tokens = [0], num_running
        while counts[-1] < len(gains):
            # Up to the next padded size, another draft costs nothing.
            num_tokens = self._padded(num_tokens + 1)
            counts.append(min(num_tokens - num_running, len(gains)))
        counts.sort(key=lambda count: -expected[count] / self.estimate(num_running + count))
        lengths = [0] * len(places)
        for count in counts:
            if count == 0:
                return lengths if counts[0] == 0 else None
            # Only the best size is worth compiling.
            starts = count == counts[0] and self._saved_if_compiled >= self._compile_seconds
            if self._is_compiled(num_running + count, starts):
                for _, i in gains[:count]:
                    lengths[i] += 1
                return lengths
            if starts:
                self._saved_if_compiled = 0.0
            elif count == counts[0]:
                # For each token that a sequence gets.
                saving = self.saving(num_running, num_running + count, expected[count])
                self._saved_if_compiled += saving * num_running / expected[count]
        return None

    def estimate(self, num_tokens: int) -> float:
        """The seconds of a step; of sizes not measured, by the one before; in proportion to each other if none was."""
        padded, measured = self._padded(num_tokens), self.step_seconds
        if padded in measured:
            return measured[padded]
        nearest = max((size for size in measured if size < padded), default=min(measured, default=1))
        return measured.get(nearest, 1.0) * (1.0 + ROW_COST * (padded - 1)) / (1.0 + ROW_COST * (nearest - 1))
