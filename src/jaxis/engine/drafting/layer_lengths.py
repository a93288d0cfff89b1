"""How many tokens layers on the devices draft: as many as pay, by chances and times of steps that are measured."""

from __future__ import annotations

import functools
import itertools
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxis.engine.drafting.draft_length import ROW_COST, DraftPlace
from jaxis.engine.drafting.spare_time import SpareTime

# Steps of a kind whose median time counts; how many are needed, of those without drafts; and after how many steps
# without one it is taken to be unknown again: it may have been measured while the machine was busy.
NUM_TIMES, MIN_PLAIN_TIMES, MAX_AGE = 9, 4, 2000
# What a draft is taken to add to a step beside its row, as a part of the time of a step without drafts, until steps
# with drafts were measured. Low, so that they are.
DRAFT_COST = 0.05
# Where no drafts pay, so many steps have some nevertheless, once the time that they may take is left.
PROBE_STEPS = 6
# Steps without drafts are measured again after so many with some; then after twice as many, up to the second number.
FIRST_CHECK, LAST_CHECK = 100, 1600
# After drafts were found not to pay, they are thought of again after so many steps.
REST_STEPS = 8


class MeasuredStep(NamedTuple):
    """A step without prefills.

    Attributes:
      num_running: Sequences in it.
      num_tokens: Its rows.
      length: Tokens that were drafted for it, one after the other; 0: none.
      num_new_tokens: Tokens that it gave.
      num_late: Tokens that the layers saw late meanwhile.
      seconds: What it took.
    """

    num_running: int
    num_tokens: int
    length: int
    num_new_tokens: int
    num_late: int
    seconds: float


_Kind = tuple[int, int, int]  # padded sequences, padded rows, length


@dataclass
class _Times:
    """What steps of a kind took.

    Attributes:
      seconds: Of the newest.
      newest: The number of the newest.
    """

    seconds: deque[float] = field(default_factory=functools.partial(deque, maxlen=NUM_TIMES))
    newest: int = 0


class LayerLengths:
    """Chooses, for each step, the number of drafts that gives most tokens in its time, the drafts' own included.

    What is not known is tried, as long as there is time that may be lost (`SpareTime`), to which right drafts add. So
    steps are never slower than without drafts for long, whatever the chances and times are.

    Args:
      padded: The number of rows that a step of so many rows is padded to, and takes the time of.
      is_compiled: `is_compiled(num_running, num_tokens)`: whether drafts for so many sequences, and a step of so many
        rows, can run at once; if not, they are going to be compiled.
      max_tokens: Most rows of a step.
      most_drafts: Most drafts of a sequence where so many run.
    """

    def __init__(
        self,
        padded: Callable[[int], int],
        is_compiled: Callable[[int, int], bool],
        max_tokens: int,
        most_drafts: Callable[[int], int],
    ) -> None:
        self._padded, self._is_compiled, self._max_tokens = padded, is_compiled, max_tokens
        self._most_drafts = most_drafts
        self._spare = SpareTime()
        self._kinds: dict[tuple[int, int, int], _Kind] = {}  # of sequences, rows and length
        self._times: dict[_Kind, _Times] = {}
        self._num_steps = 0
        self._is_open = False  # whether steps without drafts were measured
        self._awaits_programs = False
        self._num_unchecked, self._check_after = 0, FIRST_CHECK  # steps with drafts
        self._previous: MeasuredStep | None = None
        self._probe_steps_left = 0
        self._rests_until, self._rests_with = 0, (0, 0)  # a step; how many sequences of how many
        self._late_seconds: float | None = None  # of a token that the layers see late

    def choose(self, places: Sequence[DraftPlace], num_running: int) -> list[int]:
        """How many drafts to compute for each of these sequences.

        Args:
          places: Of the sequences that may get drafts.
          num_running: Sequences in the step, these included.
        """
        sizes = len(places), num_running
        if self._rests_until > self._num_steps and self._rests_with == sizes:
            return [0] * len(places)
        lengths = self._best(places, num_running)
        if not any(lengths):
            self._rests_until, self._rests_with = self._num_steps + REST_STEPS, sizes
        return lengths

    def may_catch_up(self, num_tokens: int) -> bool:
        """Whether there is time for the layers to see so many tokens late."""
        if self._late_seconds is None:
            return True
        may = self._spare.seconds > num_tokens * self._late_seconds
        if not may:
            self._late_seconds *= 0.9  # it is not measured any more
        return may

    def record(self, step: MeasuredStep) -> None:
        """Takes in a step; the others, with prefills, are told by `interrupt`."""
        self._num_steps += 1
        previous, self._previous = self._previous, step
        # What is dispatched behind a step runs in the time of the next one.
        num_late = step.num_late + (0 if previous is None else previous.num_late)
        # Between steps with and without drafts, one waits for the other.
        is_steady = previous is not None and bool(previous.length) == bool(step.length) and not num_late
        self._spare.earn(step.seconds)
        if is_steady:
            kind = self._kind(step.num_running, step.num_tokens, step.length)
            times = self._times.get(kind)
            if times is None:
                times = self._times[kind] = _Times()
            times.seconds.append(step.seconds)
            times.newest = self._num_steps
            if not step.length and self._is_open:
                return
        plain = self._plain_seconds(step.num_running)
        if plain is None:
            return
        self._is_open = True
        lost = 0.0 if is_steady and not step.length else step.seconds - plain * step.num_new_tokens / step.num_running
        self._spare.settle(-lost, plain)
        if step.length:
            self._probe_steps_left = max(self._probe_steps_left - 1, 0)
            self._num_unchecked += 1
            if step.seconds < plain or self._num_unchecked > self._check_after:
                self._check_plain_again(step.num_running)
        elif num_late:
            seconds = max(lost, 0.0) / num_late
            self._late_seconds = seconds if self._late_seconds is None else (self._late_seconds + seconds) / 2

    def _check_plain_again(self, num_running: int) -> None:
        """Has steps without drafts measured again: all that is known is in proportion to what they take."""
        self._times.pop(self._kind(num_running, num_running, 0), None)
        self._num_unchecked, self._check_after = 0, min(2 * self._check_after, LAST_CHECK)

    def interrupt(self) -> None:
        """Learns that there was a step of another kind."""
        self._previous = None

    def _best(self, places: Sequence[DraftPlace], num_running: int) -> list[int]:
        """Those of most tokens a second, if they are to be tried or pay."""
        lengths = [0] * len(places)
        plain = self._plain_seconds(num_running)
        if plain is None or self._spare.seconds <= 0:
            return lengths
        most = self._most_drafts(num_running)
        # A sequence's j-th draft counts if all before it are right, so its chances fall: sorting keeps their order.
        gains = sorted(
            ((place.chance**j, i) for i, place in enumerate(places) for j in range(1, min(place.max_drafts, most) + 1)),
            key=lambda gain: -gain[0],
        )[: max(self._max_tokens - num_running, 0)]
        expected = list(itertools.accumulate((gain for gain, _ in gains), initial=float(num_running)))
        best, best_rate = 0, 0.0
        count, awaits_programs = 0, False
        while count < len(gains):
            # Up to the next padded size, another draft costs no row.
            count = min(self._padded(num_running + count + 1) - num_running, len(gains))
            length = _longest(gains[:count])
            rate = expected[count] / self._estimate(plain, num_running, num_running + count, length)
            if rate > best_rate:
                if self._is_compiled(num_running, num_running + count):
                    best, best_rate = count, rate
                else:
                    awaits_programs = True
        if self._awaits_programs and not awaits_programs:
            self._times.clear()  # compiling took time from the steps
        self._awaits_programs = awaits_programs
        if not self._times:
            return lengths
        if best_rate * plain <= num_running and not self._probes(plain):
            return lengths
        for _, i in gains[:best]:
            lengths[i] += 1
        return lengths

    def _probes(self, plain: float) -> bool:
        """Whether drafts are to be tried that are not expected to pay."""
        if not self._probe_steps_left and self._spare.seconds > PROBE_STEPS * plain:
            self._probe_steps_left = PROBE_STEPS
        return self._probe_steps_left > 0

    def _plain_seconds(self, num_running: int) -> float | None:
        """The median time of steps without drafts, if enough were measured."""
        kind = self._kind(num_running, num_running, 0)
        times = self._known_seconds(kind)
        return None if times is None or len(times) < MIN_PLAIN_TIMES else statistics.median(times)

    def _estimate(self, plain: float, num_running: int, num_tokens: int, length: int) -> float:
        """The seconds of a step with drafts; of kinds not measured, in proportion to the nearest that was."""
        kind = self._kind(num_running, num_tokens, length)
        if (times := self._known_seconds(kind)) is not None:
            return statistics.median(times)
        near = [other for other in list(self._times) if other[0] == kind[0] and other[2] and self._known_seconds(other)]
        nearest = min(near, key=lambda other: abs(other[2] - length) + abs(other[1] - kind[1]), default=None)
        seconds = plain if nearest is None else statistics.median(self._times[nearest].seconds)
        return seconds * _cost(kind) / (1.0 if nearest is None else _cost(nearest))

    def _known_seconds(self, kind: _Kind) -> deque[float] | None:
        times = self._times.get(kind)
        if times is not None and times.newest < self._num_steps - MAX_AGE:
            del self._times[kind]
            return None
        return None if times is None else times.seconds

    def _kind(self, num_running: int, num_tokens: int, length: int) -> _Kind:
        sizes = num_running, num_tokens, length
        kind = self._kinds.get(sizes)
        if kind is None:
            kind = self._kinds[sizes] = self._padded(num_running), self._padded(num_tokens), length
        return kind


def _cost(kind: _Kind) -> float:
    """What a step with drafts is taken to cost, against one without."""
    num_running, num_tokens, length = kind
    rows = (1.0 + ROW_COST * (num_tokens - 1)) / (1.0 + ROW_COST * (num_running - 1))
    return rows + DRAFT_COST * length


def _longest(gains: Sequence[tuple[float, int]]) -> int:
    """The most drafts of a sequence among these."""
    counts: dict[int, int] = {}
    for _, i in gains:
        counts[i] = counts.get(i, 0) + 1
    return max(counts.values(), default=0)
