"""The number of drafts for each sequence of a step: as many as give most tokens a second, by measured step times."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

# Weight of a sequence's earlier guesses against those of its next step, since its text changes.
DECAY = 0.8
# Guesses with the usual chance that count beside a sequence's own, since a single step says little.
USUAL_GUESSES = 2.0
# First value of the usual chance, high so that drafts are tried.
FIRST_CHANCE = 0.75
# Weight of a single guess in the usual chance.
USUAL_STEP = 0.02
# Assumed cost of a row, or of a draft by layers, until such steps are measured, in steps of one row. It is low so that
# they are tried, and so measured.
UNKNOWN_COST = 0.05
# Newest steps of a kind whose median time counts, and the fewest that make it known: single steps may be slow for other
# reasons.
NUM_TIMES, MIN_TIMES = 9, 3
# Steps without one of a kind after which its time is unknown again: the machine may have been busy.
MAX_AGE = 1000


@dataclass(frozen=True)
class Budget:
    """Limits of the account of `DraftChooser`. The unit of time is a step without drafts.

    The account covers the few steps that show whether drafts pay for a new kind of text.

    Attributes:
      share: Share of all time that drafts may cost beyond what they gain.
      max_saved: Largest time in the account.
      max_owed: Largest time that the account may owe.
      probe: Time that a trial of drafts that are not expected to pay may cost. It lasts several steps, since their gain
        and their time show only in consecutive steps.
    """

    share: float = 0.01
    max_saved: float = 12.0
    max_owed: float = 2.0
    probe: float = 3.0


BUDGET = Budget()


class UsualChance:
    """Running average of how often guesses at the tokens of many similar sequences are right.

    Attributes:
      chance: Chance that a guess is right if all guesses before it in the step are.
    """

    def __init__(self) -> None:
        self.chance = FIRST_CHANCE

    def observe(self, num_guesses: int, num_right: int) -> None:
        """Adds the result of `num_guesses` guesses, of which the first `num_right` were right."""
        for guess in range(num_guesses):
            self.chance += USUAL_STEP * ((guess < num_right) - self.chance)


class Guessed:
    """Running average of how often guesses at the tokens of one sequence are right.

    Args:
      max_drafts: Most drafts in a step.
      usual: Average over similar sequences; None makes a new one.
    """

    def __init__(self, max_drafts: int, usual: UsualChance | None = None) -> None:
        self.max_drafts = max_drafts
        self._usual = usual or UsualChance()
        self._num_right = self._num_guesses = 0.0

    @property
    def chance(self) -> float:
        """Chance that a guess is right if all guesses before it in the step are."""
        return (self._num_right + USUAL_GUESSES * self._usual.chance) / (self._num_guesses + USUAL_GUESSES)

    def observe(self, num_guesses: int, num_right: int) -> None:
        """Adds the result of a step's guesses, of which the first `num_right` were right.

        Call it after steps without guesses, too: older results lose weight with each step, and the usual chance gains
        it.
        """
        num_seen = num_right + (num_right < num_guesses)
        self._num_right = DECAY * self._num_right + num_right
        self._num_guesses = DECAY * self._num_guesses + num_seen
        self._usual.observe(num_seen, num_right)


@dataclass
class _Times:
    """Measured times of one kind of steps.

    Attributes:
      newest_step: Number of the newest of these steps.
      seconds: Times of the newest steps.
      median: Median of `seconds`; None until it is computed.
    """

    newest_step: int
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_TIMES))
    median: float | None = None


# Number of padded rows, and number of drafts that the devices make one after the other.
_Kind = tuple[int, int]


class DraftChooser:
    """Chooses for each step the number of drafts that gives most tokens in its time, the time of drafting included.

    It keeps an account of seconds. Each step adds a small share of its time. Steps with drafts add what they save, or
    take what they lose. Looking for guesses takes its time. While the account is overdrawn, there are no drafts.

    Args:
      padded: Function from a number of rows to the padded number that a step computes.
      is_compiled: Function `is_compiled(num_running, num_tokens, starts)`. It returns True if the programs for drafts
        of so many sequences, and for a step of so many rows, are compiled. Otherwise it starts to compile them if
        `starts`.
      max_tokens: Most rows of a step.
      most_drafts: Function from the number of running sequences to the most drafts of each; None sets no such limit.
      takes_time: True if the devices make drafts one after the other. The value of guesses is then only known while
        there are some, so a few are made now and then where they are not expected to pay.
      compile_seconds: Time that missing programs must promise to save before they are compiled. Compiling takes about
        as much from the steps that run meanwhile.
      least_step_seconds: Shortest steps that get drafts.
    """

    def __init__(
        self,
        padded: Callable[[int], int],
        is_compiled: Callable[[int, int, bool], bool],
        max_tokens: int,
        most_drafts: Callable[[int], int] | None = None,
        *,
        takes_time: bool = False,
        compile_seconds: float = 0.0,
        least_step_seconds: float = 0.0,
    ) -> None:
        self._padded, self._is_compiled, self._max_tokens = padded, is_compiled, max_tokens
        self._most_drafts, self._takes_time = most_drafts, takes_time
        self._compile_seconds, self._least_step_seconds = compile_seconds, least_step_seconds
        self._times: dict[_Kind, _Times] = {}
        self._num_steps = 0
        self._saved: float | None = None
        self._saved_if_compiled = 0.0
        self._is_compiling = self._is_probing = self._has_drafts = False

    @property
    def is_overdrawn(self) -> bool:
        """True if drafts have cost more than they may."""
        return self._saved is None or self._saved <= 0.0

    @property
    def step_seconds(self) -> dict[_Kind, float]:
        """Median step times by kind: padded rows, and drafts that the devices make one after the other."""
        return {kind: median for kind in list(self._times) if (median := self._median(kind)) is not None}

    def record(self, num_running: int, num_tokens: int, length: int, num_new_tokens: int, seconds: float) -> None:
        """Records a step that read no prompts.

        Args:
          num_running: Sequences of the step. Without drafts, each would have got one token.
          num_tokens: Rows of the step.
          length: Most drafts of a sequence.
          num_new_tokens: Tokens that the step gave.
          seconds: Time of the step.
        """
        if seconds < self._least_step_seconds:
            self._saved = None
            return
        self._num_steps += 1
        had_drafts, self._has_drafts = self._has_drafts, length > 0
        kind = self._kind(num_tokens, length)
        times = self._times.get(kind)
        if times is None:
            self._times[kind] = _Times(self._num_steps)  # the first run of a program also sets it up
            return
        if had_drafts == self._has_drafts:  # otherwise, one of the two steps waits for the other
            times.newest_step, times.median = self._num_steps, None
            times.seconds.append(seconds)
        plain = self._plain_seconds(num_running)
        if plain is None:
            return
        if self._saved is None:
            self._saved = BUDGET.max_saved * plain
        gain = BUDGET.share * seconds
        if had_drafts or length:
            gain += plain * num_new_tokens / num_running - seconds
        self._saved = min(max(self._saved + gain, -BUDGET.max_owed * plain), BUDGET.max_saved * plain)

    def pay(self, seconds: float) -> None:
        """Takes the time of looking for guesses from the account."""
        if self._saved is not None:
            self._saved -= seconds

    def prepare(self, sequence: Guessed, num_running: int) -> None:
        """Compiles the programs for a sequence's first drafts, without waiting until that would have saved time."""
        for _, count in self._candidates(self._gains([sequence], num_running), num_running)[:1]:
            self._is_compiled(num_running, num_running + count, True)

    def choose(self, sequences: Sequence[Guessed], num_running: int) -> list[int]:
        """Returns the number of drafts for each of these sequences, which are among the `num_running` of the step."""
        lengths = [0] * len(sequences)
        plain = self._plain_seconds(num_running)
        if plain is None or self.is_overdrawn:
            return lengths
        gains = self._gains(sequences, num_running)
        is_best = True
        for seconds_a_token, count in self._candidates(gains, num_running):
            saved = plain / num_running - seconds_a_token
            if saved <= 0 and not self._is_probe(plain):
                break
            # Only the best size is worth compiling.
            starts = is_best and self._saved_if_compiled >= self._compile_seconds
            if self._is_compiled(num_running, num_running + count, starts):
                if is_best and self._is_compiling:
                    # Compiling took time from the steps that were measured meanwhile.
                    self._is_compiling = False
                    self._times.clear()
                    return lengths
                for _, i in gains[:count]:
                    lengths[i] += 1
                return lengths
            if starts:
                self._is_compiling, self._saved_if_compiled = True, 0.0
            elif is_best:
                # `choose` is called once per step, which gives `num_running` tokens.
                self._saved_if_compiled += saved * num_running
            is_best = False
        return lengths

    def _is_probe(self, plain: float) -> bool:
        """Returns whether to try drafts that are not expected to pay. It takes a full account to begin."""
        least = BUDGET.max_saved - BUDGET.probe if self._is_probing else BUDGET.max_saved
        self._is_probing = self._takes_time and self._saved is not None and self._saved >= least * plain
        return self._is_probing

    def _gains(self, sequences: Sequence[Guessed], num_running: int) -> list[tuple[float, int]]:
        """Returns the chance of each possible draft with the index of its sequence, likeliest first."""
        most = self._max_tokens if self._most_drafts is None else self._most_drafts(num_running)
        # A sequence's j-th draft counts if all before it are right, so its chances fall: sorting keeps their order.
        gains = sorted(
            (
                (sequence.chance**j, i)
                for i, sequence in enumerate(sequences)
                for j in range(1, min(sequence.max_drafts, most) + 1)
            ),
            key=lambda gain: -gain[0],
        )
        return gains[: max(self._max_tokens - num_running, 0)]

    def _candidates(self, gains: Sequence[tuple[float, int]], num_running: int) -> list[tuple[float, int]]:
        """Returns (seconds per token, number of drafts) of each size of step, the best first."""
        expected = list(itertools.accumulate((gain for gain, _ in gains), initial=float(num_running)))
        found, count = [], 0
        while count < len(gains):
            # Up to the next padded size, another draft costs no row.
            count = min(self._padded(num_running + count + 1) - num_running, len(gains))
            length = max(Counter(i for _, i in gains[:count]).values()) if self._takes_time else 0
            seconds = self._estimate(self._kind(num_running + count, length))
            found.append((seconds / expected[count], count))
        return sorted(found)

    def _kind(self, num_tokens: int, length: int) -> _Kind:
        return self._padded(num_tokens), length if self._takes_time else 0

    def _plain_seconds(self, num_running: int) -> float | None:
        kind = self._kind(num_running, 0)
        median = self._median(kind)
        return None if median is None or len(self._times[kind].seconds) < MIN_TIMES else median

    def _estimate(self, kind: _Kind) -> float:
        """Returns the seconds of a step. A kind that was not measured is scaled from the nearest one that was."""
        if (median := self._median(kind)) is not None:
            return median
        measured = self.step_seconds
        nearest = min(measured, key=lambda each: abs(each[0] - kind[0]) + abs(each[1] - kind[1]), default=None)
        return _cost(kind) if nearest is None else measured[nearest] * _cost(kind) / _cost(nearest)

    def _median(self, kind: _Kind) -> float | None:
        times = self._times.get(kind)
        if times is None or not times.seconds:
            return None
        if times.newest_step < self._num_steps - MAX_AGE:
            del self._times[kind]
            return None
        if times.median is None:
            times.median = statistics.median(times.seconds)
        return times.median


def _cost(kind: _Kind) -> float:
    """Returns the assumed cost of a step in steps of one row without drafts."""
    num_rows, length = kind
    return 1.0 + UNKNOWN_COST * (num_rows - 1 + length)
