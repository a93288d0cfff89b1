"""How many drafts are chosen: what gives most tokens a second, by the chances and times that were measured."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from jaxis.config.speculative import SpeculativeConfig
from jaxis.engine.drafting.draft_length import DraftLengths, DraftPlace
from jaxis.engine.drafting.make import make_speculation

SIZES = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64]


def padded(num_tokens: int) -> int:
    return next(size for size in SIZES if size >= num_tokens)


def lengths(seconds_of_a_row: float, *, is_compiled=lambda *_: True, max_tokens: int = 64) -> DraftLengths:
    """Where a step of T rows takes 1 + (T - 1) * seconds_of_a_row."""
    chosen = DraftLengths(padded, is_compiled, max_tokens)
    for size in SIZES:
        for setting_up in (10.0, 0.0):
            chosen.record(size, setting_up + 1 + (size - 1) * seconds_of_a_row)
    return chosen


def place(max_drafts: int, *steps: tuple[int, int]) -> DraftPlace:
    made = DraftPlace(max_drafts)
    for num_drafts, num_right in steps:
        made.observe(num_drafts, num_right)
    return made


def test_the_choice_is_the_best_of_all() -> None:
    for row_cost in (0.02, 0.1, 0.3, 0.7):
        places = [place(3, (3, 3), (3, 3)), place(3, (3, 1), (3, 0)), place(3)]
        chosen = lengths(row_cost).choose(places, 3)

        def rate(counts, row_cost=row_cost, places=places):
            tokens = 3 + sum(p.chance**j for p, n in zip(places, counts, strict=True) for j in range(1, n + 1))
            return tokens / (1 + (padded(3 + sum(counts)) - 1) * row_cost)

        best = max(rate(counts) for counts in itertools.product(range(4), repeat=3))
        assert rate(chosen) == pytest.approx(best)


def test_drafts_that_are_always_wrong_or_rows_that_cost_a_step_are_not_computed() -> None:
    assert lengths(0.2).choose([place(7, *[(7, 0)] * 20)], 1) == [0]
    assert lengths(2.0).choose([place(7, (7, 7))], 1) == [0]


def test_a_step_does_not_wait_for_a_program() -> None:
    asked = []
    choose = lengths(0.02, is_compiled=lambda num_tokens, starts: bool(asked.append(num_tokens))).choose
    assert choose([place(15, (15, 15))], 1) is None
    assert asked
    assert lengths(0.02, is_compiled=lambda n, starts: n <= 4).choose([place(15, (15, 15))], 1) == [3]


def test_a_size_is_compiled_once_it_would_have_saved_what_compiling_takes() -> None:
    started: set[int] = set()

    def is_compiled(num_tokens: int, starts: bool) -> bool:
        if starts:
            started.add(num_tokens)
        return False

    chosen = DraftLengths(padded, is_compiled, 64, compile_seconds=1.0)
    for size, seconds in ((1, 0.1), (16, 0.2)):
        for _ in range(2):
            chosen.record(size, seconds)
    sure = [place(15, *[(15, 15)] * 20)]
    num_tokens = 0
    while not started:
        assert chosen.choose(sure, 1) is None
        num_tokens += 1
    assert started == {16}, "the best size alone"
    assert num_tokens == pytest.approx(1 + 1.0 / (0.1 - 0.2 / 16), abs=2)
    started.clear()
    chosen = DraftLengths(padded, is_compiled, 64, compile_seconds=1.0)
    chosen.prepare(place(15), 1)
    assert len(started) == 1, "it is asked for"


def test_no_more_rows_than_a_step_may_have() -> None:
    places = [place(15, (15, 15)) for _ in range(4)]
    assert sum(lengths(0.01, max_tokens=16).choose(places, 4)) <= 12
    assert lengths(0.01, max_tokens=4).choose(places, 4) == [0] * 4


def test_no_more_drafts_than_are_allowed_beside_so_many() -> None:
    chosen = DraftLengths(padded, lambda *_: True, 64, {1: 7, 2: 3, 3: 0}.__getitem__)
    sure = [place(15, (15, 15)) for _ in range(3)]
    assert [max(chosen.choose(sure[:number], number)) for number in (1, 2, 3)] == [7, 3, 0]


def test_chances_follow_what_happens() -> None:
    assert place(4, *[(4, 4)] * 30).chance > 0.95
    assert place(4, *[(4, 0)] * 30).chance < 0.2
    assert place(4, *[(4, 4)] * 30, *[(4, 0)] * 6).chance < 0.65, "a new phase"


def test_a_size_that_was_slow_once_is_tried_again() -> None:
    chosen = lengths(0.02)
    chosen.record(8, 100.0)
    for size in (2, 4, 12, 16, 24, 32):
        for _ in range(9):
            chosen.record(size, 50.0)
    for _ in range(9):
        chosen.record(8, 100.0)
    sure = [place(7, *[(7, 7)] * 20)]
    assert chosen.choose(sure, 1) == [0]
    for _ in range(1010):
        chosen.record(1, 1.0)
    assert chosen.choose(sure, 1) == [7]


def test_sizes_that_were_never_measured_are_tried_beside_many_others_too() -> None:
    """A row costs a twentieth of a step of one row, not of a step of 16."""
    chosen = DraftLengths(padded, lambda *_: True, 64)
    for _ in range(3):
        chosen.record(16, 0.08)
    counts = chosen.choose([place(15, (1, 1)) for _ in range(16)], 16)
    assert sum(counts) >= 16
    chosen.record(64, 0.2)
    chosen.record(64, 1.0)
    assert sum(chosen.choose([place(15, (1, 1)) for _ in range(16)], 16)) < 48, "measured, it does not pay"


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
    speculation = make_speculation(SpeculativeConfig("ngram"), runner, lambda *_: False)
    assert speculation is not None
    # Two sequences on each rank, whose steps take as long with 8 rows as with 2.
    for _ in range(3):
        for size in (2, 4, 8):
            speculation.lengths.record(4 * size, 1.0)
    assert speculation.lengths.choose([DraftPlace(5) for _ in range(8)], 8) == [3] * 8
    assert max(rows_of_a_rank) == 8
