"""How many tokens layers draft: never slower than none for long, and close to the best where drafts pay."""

from __future__ import annotations

import itertools
import random

import pytest

from jaxis.engine.drafting.draft_length import DraftPlace, TypicalChance
from jaxis.engine.drafting.layer_lengths import MAX_AGE, LayerLengths, MeasuredStep

SIZES = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64]
MAX_DRAFTS = 3


def padded(num_tokens: int) -> int:
    return next(size for size in SIZES if size >= num_tokens)


class Machine:
    """Sequences of 100 tokens each that decode together: a step takes 1, and more with drafts.

    Args:
      chance: That a draft is right if those before it are.
      row: What each row more adds to a step.
      draft: What each draft adds, and the waiting for all of them.
      num_running: Sequences.
    """

    def __init__(self, chance: float, row: float, draft: float, num_running: int = 1, noise: float = 0.05) -> None:
        self.chance, self.row, self.draft, self.num_running, self.noise = chance, row, draft, num_running, noise
        self.rng = random.Random(0)
        self.lengths = LayerLengths(padded, lambda *_: True, 64, lambda _: MAX_DRAFTS)
        self.typical = TypicalChance()

    def seconds(self, num_tokens: int, length: int) -> float:
        waiting = self.draft * (1 + length) if length else 0.0
        return 1.0 + self.row * (padded(num_tokens) - padded(self.num_running)) + waiting

    def run(self, num_steps: int) -> float:
        """Tokens a second, against those without drafts."""
        time = tokens = 0.0
        length = 0
        for number in range(num_steps):
            if number % 100 == 0:
                places = [DraftPlace(MAX_DRAFTS, self.typical) for _ in range(self.num_running)]
            previous, numbers = length, self.lengths.choose(places, self.num_running)
            length = max(numbers)
            num_rows = self.num_running + sum(numbers)
            seconds = self.seconds(num_rows, length) * self.rng.uniform(1 - self.noise, 1 + self.noise)
            if bool(previous) != bool(length):
                seconds += 0.3
            new = 0
            for place, number_of in zip(places, numbers, strict=True):
                right = sum(1 for _ in itertools.takewhile(lambda _: self.rng.random() < self.chance, range(number_of)))
                if number_of:
                    place.observe(number_of, right)
                new += 1 + right
            self.lengths.record(MeasuredStep(self.num_running, num_rows, length, new, 0, seconds))
            time, tokens = time + seconds, tokens + new
        return tokens / time / self.num_running

    @property
    def best(self) -> float:
        """What always the same number gives at best, against none."""
        rates = [1.0]
        for length in range(1, MAX_DRAFTS + 1):
            expected = sum(self.chance**i for i in range(length + 1))
            rates.append(expected / self.seconds(self.num_running * (1 + length), length))
        return max(rates)


def test_a_kind_of_step_that_is_to_be_measured_again_may_first_come_back_much_later() -> None:
    machine = Machine(chance=0.97, row=0.02, draft=0.05)
    machine.run(300)
    place = DraftPlace(MAX_DRAFTS, machine.typical)
    while any(machine.lengths.choose([place], 1)):
        machine.run(1)  # until steps without drafts are measured again
    machine.num_running = 8
    machine.run(MAX_AGE + 10)
    machine.num_running = 1
    assert machine.run(300) > 0.9 * machine.best


@pytest.mark.parametrize("num_running", [1, 6])
@pytest.mark.parametrize("draft", [0.05, 0.2, 0.6])
@pytest.mark.parametrize("row", [0.02, 0.2, 0.8])
@pytest.mark.parametrize("chance", [0.05, 0.4, 0.6, 0.8, 0.97])
def test_it_is_never_slower_and_close_to_the_best(chance: float, row: float, draft: float, num_running: int) -> None:
    machine = Machine(chance, row / num_running, draft, num_running)
    machine.run(300)
    rate = machine.run(1500)
    assert rate > 0.98
    assert rate > 0.9 * machine.best


def test_what_is_not_compiled_delays_no_step() -> None:
    machine = Machine(0.9, 0.02, 0.02)
    asked: list[tuple[int, int]] = []
    machine.lengths = LayerLengths(padded, lambda *sizes: bool(asked.append(sizes)), 64, lambda _: MAX_DRAFTS)
    assert machine.run(200) == pytest.approx(1.0, rel=0.02)
    assert {(1, 2), (1, 4)} <= set(asked)


def test_no_more_rows_and_no_more_drafts_than_are_allowed() -> None:
    for max_tokens, most, largest in ((64, 3, 3), (64, 1, 1), (2, 3, 1), (1, 3, 0)):
        machine = Machine(0.95, 0.0, 0.0)
        lengths = LayerLengths(padded, lambda *_: True, max_tokens, lambda _, most=most: most)
        machine.lengths = lengths
        machine.run(200)
        chosen = set()
        for _ in range(20):  # some of them without drafts, to measure those again
            machine.run(1)
            chosen.update(lengths.choose([DraftPlace(3, machine.typical)], 1))
        assert max(chosen) == largest


def test_when_drafts_begin_to_pay_they_are_made() -> None:
    machine = Machine(0.05, 0.1, 0.1)
    assert machine.run(2000) > 0.97
    machine.chance = 0.95
    machine.run(2000)
    assert machine.run(2000) > 0.9 * machine.best > 1.2
    machine.chance = 0.05
    assert machine.run(2000) > 0.95


def test_layers_do_not_see_tokens_late_where_that_takes_too_long() -> None:
    for late_seconds in (0.0, 20.0):
        lengths = LayerLengths(padded, lambda *_: False, 64, lambda _: MAX_DRAFTS)
        for num_late in (*[0] * 3000, 64, 0, 0):
            lengths.record(MeasuredStep(1, 1, 0, 1, num_late, 1.0 + late_seconds * bool(num_late)))
        assert lengths.may_catch_up(64)
        for num_late in (64, 0, 64, 0):
            lengths.record(MeasuredStep(1, 1, 0, 1, num_late, 1.0 + late_seconds * bool(num_late)))
        assert lengths.may_catch_up(64) == (late_seconds == 0.0)
