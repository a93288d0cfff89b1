"""How many drafts are chosen: never slower than none for long, and close to the best where drafts pay.

On simulated machines, whose steps take known times.
"""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import pytest

from jaxis.config.speculative import SpeculativeConfig
from jaxis.engine.drafting.chooser import MAX_AGE, MIN_TIMES, DraftChooser, Guessed, UsualChance
from jaxis.engine.drafting.make import make_speculation
from jaxis.engine.drafting.speculation import Speculation
from tests.support.quick_rows import quick_rows

SIZES = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64]
MAX_DRAFTS = 3


def padded(num_tokens: int) -> int:
    return next(size for size in SIZES if size >= num_tokens)


def chooser(seconds_of_a_row: float, *, is_compiled=lambda *_: True, max_tokens=64, **options) -> DraftChooser:
    """Where a step of T rows takes 1 + (T - 1) * seconds_of_a_row, which is known."""
    made = DraftChooser(padded, is_compiled, max_tokens, **options)
    for size in SIZES:
        for _ in range(1 + MIN_TIMES):
            made.record(size, size, 0, size, 1 + (size - 1) * seconds_of_a_row)
    return made


def guessed(max_drafts: int, *steps: tuple[int, int]) -> Guessed:
    made = Guessed(max_drafts)
    for num_drafts, num_right in steps:
        made.observe(num_drafts, num_right)
    return made


def test_the_choice_is_the_best_of_all() -> None:
    for row_cost in (0.02, 0.1, 0.3, 0.7):
        sequences = [guessed(3, (3, 3), (3, 3)), guessed(3, (3, 1), (3, 0)), guessed(3)]
        chosen = chooser(row_cost).choose(sequences, 3)

        def rate(counts, row_cost=row_cost, sequences=sequences):
            tokens = 3 + sum(s.chance**j for s, n in zip(sequences, counts, strict=True) for j in range(1, n + 1))
            return tokens / (1 + (padded(3 + sum(counts)) - 1) * row_cost)

        best = max(rate(counts) for counts in itertools.product(range(4), repeat=3))
        assert rate(chosen) == pytest.approx(best)


def test_drafts_that_are_always_wrong_or_rows_that_cost_a_step_are_not_computed() -> None:
    assert chooser(0.2).choose([guessed(7, *[(7, 0)] * 20)], 1) == [0]
    assert chooser(2.0).choose([guessed(7, (7, 7))], 1) == [0]


def test_before_steps_without_drafts_were_measured_there_are_none() -> None:
    new = DraftChooser(padded, lambda *_: True, 64)
    for _ in range(1 + MIN_TIMES):
        assert new.choose([guessed(3, (3, 3))], 1) == [0]
        new.record(1, 1, 0, 1, 1.0)
    assert new.choose([guessed(3, (3, 3))], 1) == [3]


def test_a_step_does_not_wait_for_a_program() -> None:
    asked = []
    choose = chooser(0.02, is_compiled=lambda _, num_tokens, starts: bool(asked.append(num_tokens))).choose
    assert choose([guessed(15, (15, 15))], 1) == [0]
    assert asked
    smaller = chooser(0.02, is_compiled=lambda _, num_tokens, starts: num_tokens <= 4)
    assert smaller.choose([guessed(15, (15, 15))], 1) == [3]


def test_times_that_were_measured_while_programs_were_compiled_are_measured_again() -> None:
    compiled: set[int] = set()
    made = chooser(0.02, is_compiled=lambda _, num_tokens, starts: num_tokens in compiled)
    sure = [guessed(15, *[(15, 15)] * 9)]
    assert made.choose(sure, 1) == [0]
    compiled.add(16)
    assert made.choose(sure, 1) == [0]
    assert made.step_seconds == {}
    for _ in range(1 + MIN_TIMES):
        made.record(1, 1, 0, 1, 1.0)
    assert made.choose(sure, 1) == [15]


def test_a_size_is_compiled_once_it_would_have_saved_what_compiling_takes() -> None:
    started: set[int] = set()

    def is_compiled(num_running: int, num_tokens: int, starts: bool) -> bool:
        if starts:
            started.add(num_tokens)
        return False

    made = DraftChooser(padded, is_compiled, 64, compile_seconds=1.0)
    for size, seconds in ((1, 0.1), (16, 0.2)):
        for _ in range(1 + MIN_TIMES):
            made.record(size, size, 0, size, seconds)
    sure = [guessed(15, *[(15, 15)] * 20)]
    num_tokens = 0
    while not started:
        assert made.choose(sure, 1) == [0]
        num_tokens += 1
    assert started == {16}, "the best size alone"
    assert num_tokens == pytest.approx(1 + 1.0 / (0.1 - 0.2 / 16), abs=2)
    started.clear()
    DraftChooser(padded, is_compiled, 64, compile_seconds=1.0).prepare(guessed(15), 1)
    assert len(started) == 1, "it is asked for"


def test_no_more_rows_and_no_more_drafts_than_are_allowed() -> None:
    sure = [guessed(15, (15, 15)) for _ in range(4)]
    assert sum(chooser(0.01, max_tokens=16).choose(sure, 4)) <= 12
    assert chooser(0.01, max_tokens=4).choose(sure, 4) == [0] * 4
    limited = chooser(0.0, most_drafts={1: 7, 2: 3, 3: 0}.__getitem__)
    assert [max(limited.choose(sure[:number], number)) for number in (1, 2, 3)] == [7, 3, 0]


def test_chances_follow_what_happens() -> None:
    assert guessed(4, *[(4, 4)] * 30).chance > 0.9
    assert guessed(4, *[(4, 0)] * 30).chance < 0.2
    assert guessed(4, *[(4, 4)] * 30, *[(4, 0)] * 6).chance < 0.65, "a new phase"


def test_a_new_sequence_is_taken_for_what_is_usual() -> None:
    usual = UsualChance()
    for _ in range(300):
        usual.observe(1, 0)
    assert Guessed(4, usual).chance < 0.1


def test_a_size_that_was_slow_once_is_tried_again() -> None:
    made = chooser(0.02)
    for size in SIZES[1:]:
        for _ in range(9):
            made.record(size, size, 0, size, 100.0)
    sure = [guessed(7, *[(7, 7)] * 20)]
    assert made.choose(sure, 1) == [0]
    for _ in range(MAX_AGE + 1):
        made.record(1, 1, 0, 1, 1.0)
    assert made.choose(sure, 1) == [7]


def test_sizes_that_were_never_measured_are_tried_beside_many_others_too() -> None:
    """A row costs a twentieth of a step of one row, not of a step of 16."""
    made = DraftChooser(padded, lambda *_: True, 64)
    for _ in range(1 + MIN_TIMES):
        made.record(16, 16, 0, 16, 0.08)
    counts = made.choose([guessed(15, (1, 1)) for _ in range(16)], 16)
    assert sum(counts) >= 16
    for _ in range(2):
        made.record(16, 64, 1, 40, 1.0)
    assert sum(made.choose([guessed(15, (1, 1)) for _ in range(16)], 16)) < 48, "measured, it does not pay"


def test_looking_for_guesses_is_paid_for() -> None:
    made = chooser(0.02)
    sure = [guessed(3, (3, 3))]
    assert made.choose(sure, 1) == [3]
    made.pay(100.0)
    assert made.is_overdrawn
    assert made.choose(sure, 1) == [0]
    while made.is_overdrawn:
        made.record(1, 1, 0, 1, 1.0)
    assert made.choose(sure, 1) == [3]


def test_steps_that_are_too_short_have_no_drafts() -> None:
    made = chooser(0.0, least_step_seconds=0.005)
    assert not made.is_overdrawn
    made.record(1, 1, 0, 1, 0.001)
    assert made.is_overdrawn
    made.record(1, 1, 0, 1, 1.0)
    assert not made.is_overdrawn


def test_data_ranks_share_the_drafts_of_a_step() -> None:
    rows_of_a_rank: list[int] = []

    def can_draft(num_tokens: int, *, starts: bool) -> bool:
        rows_of_a_rank.append(num_tokens)
        return True

    runner = SimpleNamespace(
        num_ranks=4,
        step_shape=lambda num_tokens: SimpleNamespace(num_tokens=padded(num_tokens)),
        can_draft=can_draft,
        vllm_config=SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=8)),
    )
    speculation = make_speculation(SpeculativeConfig("ngram"), runner, lambda *_: False, None)
    assert isinstance(speculation, Speculation)
    # Two sequences on each rank, whose steps take as long with 8 rows as with 2.
    for _ in range(1 + MIN_TIMES):
        for size in (2, 4, 8):
            speculation.chooser.record(8, 4 * size, 0, 8, 1.0)
    assert speculation.chooser.choose([Guessed(5) for _ in range(8)], 8) == [3] * 8
    assert max(rows_of_a_rank) == 8


class Machine:
    """Sequences of 100 tokens each that decode together: a step takes 1, and more with drafts.

    Args:
      chance: That a draft is right if those before it are.
      row: What each row more adds to a step.
      draft: What each draft by layers adds, and the waiting for all of them.
      num_running: Sequences.
    """

    def __init__(self, chance: float, row: float, draft: float, num_running: int = 1, noise: float = 0.05) -> None:
        self.chance, self.row, self.draft, self.num_running, self.noise = chance, row, draft, num_running, noise
        self.rng = random.Random(0)
        self.chooser = DraftChooser(padded, lambda *_: True, 64, lambda _: MAX_DRAFTS, takes_time=True)
        self.usual = UsualChance()

    def seconds(self, num_tokens: int, length: int) -> float:
        waiting = self.draft * (1 + length) if length else 0.0
        return 1.0 + self.row * (padded(num_tokens) - padded(self.num_running)) + waiting

    def run(self, num_steps: int) -> float:
        """Tokens a second, against those without drafts."""
        time = tokens = 0.0
        length = 0
        for number in range(num_steps):
            if number % 100 == 0:
                sequences = [Guessed(MAX_DRAFTS, self.usual) for _ in range(self.num_running)]
            previous, numbers = length, self.chooser.choose(sequences, self.num_running)
            length = max(numbers)
            num_rows = self.num_running + sum(numbers)
            seconds = self.seconds(num_rows, length) * self.rng.uniform(1 - self.noise, 1 + self.noise)
            if bool(previous) != bool(length):
                seconds += 0.3
            new = 0
            for sequence, number_of in zip(sequences, numbers, strict=True):
                right = sum(1 for _ in itertools.takewhile(lambda _: self.rng.random() < self.chance, range(number_of)))
                sequence.observe(number_of, right)
                new += 1 + right
            self.chooser.record(self.num_running, num_rows, length, new, seconds)
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


@pytest.mark.sampled(8)
@pytest.mark.parametrize("num_running", [1, 6])
@pytest.mark.parametrize("draft", quick_rows([0.05, 0.2, 0.6], [0.05, 0.6]))
@pytest.mark.parametrize("row", quick_rows([0.02, 0.2, 0.8], [0.02, 0.8]))
@pytest.mark.parametrize("chance", [0.05, 0.4, 0.6, 0.8, 0.97])
def test_it_is_never_slower_and_close_to_the_best(chance: float, row: float, draft: float, num_running: int) -> None:
    machine = Machine(chance, row / num_running, draft, num_running)
    machine.run(300)
    rate = machine.run(1500)
    assert rate > 0.98
    assert rate > 0.9 * machine.best


def test_when_drafts_begin_to_pay_they_are_made() -> None:
    machine = Machine(0.05, 0.1, 0.1)
    assert machine.run(2000) > 0.97
    machine.chance = 0.95
    machine.run(2000)
    assert machine.run(2000) > 0.9 * machine.best > 1.2
    machine.chance = 0.05
    assert machine.run(2000) > 0.95
