"""How many drafts each sequence of a step gets: as many as give most tokens a second, by what was measured."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

# A sequence's text changes: each of its steps weighs so much of the one after it.
DECAY = 0.8
# To a sequence's own guesses, so many are added of which the usual share is right: a single step says little.
USUAL_GUESSES = 2.0
# The share that is taken to be usual at first, high so that drafts are tried, and how much each guess changes it.
FIRST_CHANCE, USUAL_STEP = 0.75, 0.02
# What a row, or a draft by layers, is taken to add to the time of a step of one row until such steps were measured.
# Low, so that they are.
UNKNOWN_COST = 0.05
# Median times are of so many steps, and known from so many on: single steps are slow for other reasons. After so many
# steps without one of a kind, its time is unknown again: the machine may have been busy.
NUM_TIMES, MIN_TIMES, MAX_AGE = 9, 3, 1000
# What drafts may cost beyond what they gain, as a share of all time, and how much of it, and of the gains, is saved up
# or owed at most, in steps without drafts: enough to find out in a few steps whether a new sort of text is guessed.
SHARE, MOST_SAVED, MOST_OWED = 0.01, 12.0, 2.0
# So much of what is saved up, in the same unit, is spent at a time on drafts that are not expected to pay: what they
# are worth, and what steps with them take, shows in several steps one after the other.
PROBE = 3.0


class UsualChance:
    """How often guesses at the tokens of all sequences of a sort were right lately.

    Attributes:
      chance: The chance that a guess is right if those before it are.
    """

    def __init__(self) -> None:
        self.chance = FIRST_CHANCE

    def observe(self, num_guesses: int, num_right: int) -> None:
        """Learns that of so many guesses, `num_right` were right."""
        for guess in range(num_guesses):
            self.chance += USUAL_STEP * ((guess < num_right) - self.chance)


class Guessed:
    """How often guesses at a sequence's tokens are right.

    Attributes:
      max_drafts: Most drafts in a step.

    Args:
      max_drafts: Most drafts in a step.
      usual: What is usual for such sequences.
    """

    def __init__(self, max_drafts: int, usual: UsualChance | None = None) -> None:
        self.max_drafts = max_drafts
        self._usual = usual or UsualChance()
        self._num_right = self._num_guesses = 0.0

    @property
    def chance(self) -> float:
        """The chance that a guess is right if those before it are."""
        return (self._num_right + USUAL_GUESSES * self._usual.chance) / (self._num_guesses + USUAL_GUESSES)

    def observe(self, num_guesses: int, num_right: int) -> None:
        """Learns that of a step's guesses, `num_right` were right before the first wrong one.

        To be called after steps without guesses, too: what was learnt before then says less, and the usual more.
        """
        num_seen = num_right + (num_right < num_guesses)
        self._num_right = DECAY * self._num_right + num_right
        self._num_guesses = DECAY * self._num_guesses + num_seen
        self._usual.observe(num_seen, num_right)


@dataclass
class _Times:
    """What steps of a kind took.

    Attributes:
      newest_step: The number of the newest.
      seconds: Of the newest ones.
      median: Of `seconds`; None: to be computed.
    """

    newest_step: int
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_TIMES))
    median: float | None = None


# Padded rows, and how many drafts were made one after the other on the devices.
_Kind = tuple[int, int]


class DraftChooser:
    """Chooses, for each step, the number of drafts that gives most tokens in its time, that of the drafts included.

    It keeps an account of seconds: each step adds a small share of its time; what steps with drafts save is added, and
    what they lose is taken off, and so is what looking for guesses takes. While it is overdrawn, there are no drafts.

    Args:
      padded: The number of rows that a step of so many rows is padded to, and takes the time of.
      is_compiled: `is_compiled(num_running, num_tokens, starts)`: whether drafts for so many sequences, and a step of
        so many rows, can run at once; if not, `starts` says whether they are going to be compiled.
      max_tokens: Most rows of a step.
      most_drafts: Most drafts of a sequence where so many run; None: as many as each may have.
      takes_time: Whether drafts are made one after the other on the devices. What guesses are worth is known only while
        there are some, so a few are made now and then where they are not expected to pay.
      compile_seconds: What is missing is compiled once it would have saved so many seconds, which compiling it takes
        from the steps that run meanwhile.
      least_step_seconds: Where steps are shorter, there are no drafts.
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
        """Whether drafts have cost more than they may."""
        return self._saved is None or self._saved <= 0.0

    @property
    def step_seconds(self) -> dict[_Kind, float]:
        """Median times of the steps that were measured, by padded rows and drafts made one after the other."""
        return {kind: median for kind in list(self._times) if (median := self._median(kind)) is not None}

    def record(self, num_running: int, num_tokens: int, length: int, num_new_tokens: int, seconds: float) -> None:
        """Takes in a step that read no prompts.

        Args:
          num_running: Sequences in it, each of which would have got one token without drafts.
          num_tokens: Its rows.
          length: Most drafts of a sequence.
          num_new_tokens: Tokens that it gave.
          seconds: What it took.
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
        if had_drafts == self._has_drafts:  # else one of them waits for the other
            times.newest_step, times.median = self._num_steps, None
            times.seconds.append(seconds)
        plain = self._plain_seconds(num_running)
        if plain is None:
            return
        if self._saved is None:
            self._saved = MOST_SAVED * plain
        gain = SHARE * seconds
        if had_drafts or length:
            gain += plain * num_new_tokens / num_running - seconds
        self._saved = min(max(self._saved + gain, -MOST_OWED * plain), MOST_SAVED * plain)

    def pay(self, seconds: float) -> None:
        """Takes from the account what looking for guesses took."""
        if self._saved is not None:
            self._saved -= seconds

    def prepare(self, sequence: Guessed, num_running: int) -> None:
        """Has compiled what a sequence's first drafts need, whatever it would have saved so far."""
        for _, count in self._candidates(self._gains([sequence], num_running), num_running)[:1]:
            self._is_compiled(num_running, num_running + count, True)

    def choose(self, sequences: Sequence[Guessed], num_running: int) -> list[int]:
        """How many drafts to compute for each of these sequences.

        Args:
          sequences: Those that may get drafts.
          num_running: Sequences in the step, these included.
        """
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
                # This is asked once for each token of a sequence.
                self._saved_if_compiled += saved * num_running
            is_best = False
        return lengths

    def _is_probe(self, plain: float) -> bool:
        """Whether drafts are to be tried that are not expected to pay: where their time is saved up."""
        least = MOST_SAVED - PROBE if self._is_probing else MOST_SAVED
        self._is_probing = self._takes_time and self._saved is not None and self._saved >= least * plain
        return self._is_probing

    def _gains(self, sequences: Sequence[Guessed], num_running: int) -> list[tuple[float, int]]:
        """The chance of each possible draft, and the index of its sequence, likeliest first."""
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
        """(Seconds a token, number of drafts) of each size of step, the best first."""
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
        """The median time of steps without drafts, if enough were measured."""
        kind = self._kind(num_running, 0)
        median = self._median(kind)
        return None if median is None or len(self._times[kind].seconds) < MIN_TIMES else median

    def _estimate(self, kind: _Kind) -> float:
        """The seconds of a step; of kinds not measured, in proportion to the nearest that was."""
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
    """What a step is taken to cost, against one of one row without drafts."""
    num_rows, length = kind
    return 1.0 + UNKNOWN_COST * (num_rows - 1 + length)
