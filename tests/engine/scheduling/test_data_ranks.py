"""Data ranks: which one a sequence gets, and random lives of many sequences on all of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.engine.scheduling.data_ranks import DataRanksBlocks
from jaxis.errors import RequestError
from tests.engine.scheduling.simulated_ranks import SimulatedRanks
from tests.support.simulated_engine import VOCABULARY_SIZE
from tests.support.simulated_store import SimulatedStore

SHARED_PREFIXES = [[5] * 24, [7, 8] * 12, list(range(1, 13)) * 2]
BLOCKS = st.sampled_from([12, 16, {FULL_CONTEXT: 12, AttentionSpan(7): 12}])


class RanksMachine(RuleBasedStateMachine):
    """Any interleaving that the engine's contract allows."""

    @initialize(
        num_ranks=st.integers(2, 4),
        num_blocks=BLOCKS,
        max_num_seqs=st.integers(1, 4),
        spare_budget=st.integers(0, 12),
        enable_prefix_caching=st.booleans(),
        num_state_slots=st.one_of(st.none(), st.integers(2, 8)),
        run_ahead=st.integers(0, 2),
        store=st.one_of(st.none(), st.builds(SimulatedStore, st.integers(1, 40), saves_registered=st.booleans())),
        max_drafts=st.sampled_from([0, 0, 3]),
    )
    def start(
        self, num_ranks: int, max_num_seqs: int, spare_budget: int, store: SimulatedStore | None, **arguments: object
    ) -> None:
        if not arguments["enable_prefix_caching"]:
            store = None
        self.ranks = SimulatedRanks(
            num_ranks,
            block_size=4,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + spare_budget,
            max_model_len=40,
            store=store,
            **arguments,
        )

    @rule(
        prefix=st.sampled_from(SHARED_PREFIXES),
        prefix_length=st.integers(0, 24),
        suffix=st.lists(st.integers(0, VOCABULARY_SIZE - 1), min_size=1, max_size=4),
        max_tokens=st.integers(1, 12),
        n=st.sampled_from([1, 1, 1, 3]),
        priority=st.sampled_from([0, 0, 1]),
        cache_salt=st.sampled_from([None, None, "a"]),
        ignore_eos=st.booleans(),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
    )
    def add(self, prefix: list[int], prefix_length: int, suffix: list[int], **rest: object) -> None:
        self.ranks.add(prefix[:prefix_length] + suffix, **rest)

    @rule(num_steps=st.integers(1, 10))
    def steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.ranks.step()

    @precondition(lambda self: self.ranks.unfinished)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.ranks.finish(data.draw(st.sampled_from(self.ranks.unfinished)))

    @rule()
    def reset_prefix_cache(self) -> None:
        self.ranks.scheduler.block_manager.reset_prefix_cache()

    def teardown(self) -> None:
        if hasattr(self, "ranks"):
            self.ranks.drain()


RanksMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestDataRanks = RanksMachine.TestCase


class TestDataRanksLong(RanksMachine.TestCase):
    settings = settings(RanksMachine.TestCase.settings, max_examples=1000, stateful_step_count=40, derandomize=False)


def run_to_end(ranks: SimulatedRanks, prompt: list[int], **arguments: object) -> int:
    """Runs one request alone; returns its rank."""
    [sequence] = ranks.add(prompt, **arguments)
    ranks.drain()
    return ranks.rank_of[sequence]


def ranks_of(ranks: SimulatedRanks, prompts: list[list[int]]) -> list[int]:
    """Adds requests at once, schedules a step, and returns their ranks."""
    sequences = [ranks.add(prompt)[0] for prompt in prompts]
    ranks.schedule()
    return [ranks.rank_of[sequence] for sequence in sequences]


def prompt(first: int, length: int = 40) -> list[int]:
    return [first] * length


def test_requests_at_once_spread_over_all_ranks():
    ranks = SimulatedRanks(4, max_num_batched_tokens=64)
    assert sorted(ranks_of(ranks, [prompt(i, 8) for i in range(8)])) == [0, 0, 1, 1, 2, 2, 3, 3]
    ranks.drain()


def test_a_long_prompt_weighs_as_much_as_several_short_ones():
    ranks = SimulatedRanks(2, num_blocks=128, max_num_seqs=8, max_num_batched_tokens=512, max_model_len=256)
    first, *others = ranks_of(ranks, [prompt(1, 200), prompt(2, 4), prompt(3, 4), prompt(4, 4)])
    assert others == [1 - first] * 3
    ranks.drain()


def test_a_prompt_goes_to_the_rank_that_has_its_prefix():
    ranks = SimulatedRanks(4, num_blocks=64)
    run_to_end(ranks, prompt(1))
    cached = run_to_end(ranks, prompt(2))
    for other in (prompt(3), prompt(4)):  # where most is to be computed
        run_to_end(ranks, other)
    before = ranks.scheduler.block_manager.prefix_cache_hits
    assert run_to_end(ranks, [*prompt(2), 9, 9]) == cached
    assert ranks.scheduler.block_manager.prefix_cache_hits == before + 40


def test_many_requests_with_one_long_prefix_fill_its_rank_and_then_the_others():
    ranks = SimulatedRanks(2, num_blocks=256, max_num_seqs=4, max_num_batched_tokens=512, max_model_len=256)
    cached = run_to_end(ranks, prompt(1, 200))
    assert ranks_of(ranks, [[*prompt(1, 200), i] for i in range(6)]) == [cached] * 4 + [1 - cached] * 2
    ranks.drain()


def test_a_long_prefix_is_worth_waiting_for():
    ranks = SimulatedRanks(2, num_blocks=256, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=256)
    cached = run_to_end(ranks, prompt(1, 200))
    busy = ranks.add([*prompt(1, 160), *prompt(2, 40)])[0]
    assert ranks_of(ranks, [[*prompt(1, 200), 3]]) == [cached]
    assert ranks.rank_of[busy] == cached
    ranks.drain()


def test_a_short_prefix_that_all_share_does_not_keep_them_on_one_rank():
    ranks = SimulatedRanks(4, num_blocks=64, max_num_seqs=8, max_num_batched_tokens=64)
    run_to_end(ranks, prompt(1, 8))
    chosen = ranks_of(ranks, [[*prompt(1, 8), i] for i in range(8)])
    assert [chosen.count(rank) for rank in range(4)] == [2] * 4
    ranks.drain()


def test_what_one_rank_saved_another_one_loads():
    store = SimulatedStore(100, loss=0)
    ranks = SimulatedRanks(2, num_blocks=24, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=60, store=store)
    first = run_to_end(ranks, prompt(1))
    for i in range(2, 8):  # in whose places the blocks were
        run_to_end(ranks, prompt(i))
    held, digests = ranks.scheduler.block_manager.ranks, next(sequence.block_digests for sequence in ranks.rank_of)
    assert all(rank.pools[0].find(digests[0]) is None for rank in held)
    chosen = ranks_of(ranks, [[*prompt(1), 9, i] for i in range(4)])
    ranks.drain()
    assert sorted(chosen) == [0, 0, 1, 1]
    assert held[1 - first].prefix_cache_hits >= 40


def test_a_prompt_goes_to_the_rank_that_need_not_load_its_prefix():
    ranks = SimulatedRanks(
        2, num_blocks=64, max_num_batched_tokens=64, store=SimulatedStore(100, saves_registered=True, loss=0)
    )
    assert ranks_of(ranks, [prompt(2), prompt(1)]) == [0, 1]
    ranks.drain()
    [digest, *_] = next(sequence.block_digests for sequence in ranks.rank_of if ranks.rank_of[sequence] == 1)
    run_to_end(ranks, prompt(3))  # what was computed last is saved with the next step
    assert ranks.store.has(0, digest)
    assert run_to_end(ranks, [*prompt(1), 9]) == 1
    assert ranks.store.num_loaded == 0


def test_a_rank_with_nothing_to_compute_saves_beside_others():
    store = SimulatedStore(100, saves_registered=True, loss=0)
    ranks = SimulatedRanks(2, num_blocks=64, max_num_seqs=1, max_num_batched_tokens=64, store=store)
    busy, short = (ranks.add(prompt(i, 4), max_tokens=count)[0] for i, count in enumerate([30, 5]))
    while ranks.unfinished != [busy]:
        ranks.step()
    for _ in range(3):
        ranks.step()
    assert ranks.unfinished == [busy]
    assert store.has(0, short.block_digests[1])
    ranks.drain()


def test_what_no_rank_can_begin_waits_for_the_first_that_can():
    ranks = SimulatedRanks(2, max_num_seqs=1, max_num_batched_tokens=64)
    short, long, waiting = (ranks.add(prompt(i, 4), max_tokens=count)[0] for i, count in enumerate([3, 12, 2]))
    ranks.schedule()
    assert waiting in ranks.unassigned
    ranks.drain()
    assert ranks.rank_of[waiting] == ranks.rank_of[short] != ranks.rank_of[long]


def test_a_rank_without_blocks_is_left_for_one_with_blocks():
    ranks = SimulatedRanks(2, num_blocks=12, max_num_seqs=8, max_num_batched_tokens=64)
    [large] = ranks.add(prompt(1, 44), max_tokens=4)
    ranks.schedule()
    ranks.update()
    assert ranks_of(ranks, [prompt(i, 8) for i in range(2, 7)]) == [1 - ranks.rank_of[large]] * 5
    ranks.drain()


def test_one_rank_at_work_leaves_the_others_idle():
    ranks = SimulatedRanks(3)
    ranks.add(prompt(1, 8))
    output = ranks.schedule()
    assert [part.num_tokens for part in output.ranks] == [8, 0, 0]
    assert output.num_tokens == 8
    ranks.drain()


def test_priorities_hold_over_all_ranks():
    ranks = SimulatedRanks(2, max_num_seqs=1, max_num_batched_tokens=64)
    late = [ranks.add(prompt(i, 4), priority=1)[0] for i in range(2)]
    soon = [ranks.add(prompt(i, 4), priority=0)[0] for i in range(2)]
    ranks.schedule()
    assert ranks.unassigned == late
    assert {ranks.rank_of[sequence] for sequence in soon} == {0, 1}
    ranks.drain()


def test_an_id_in_use_is_refused_whether_its_sequence_has_a_rank_or_not():
    ranks = SimulatedRanks(2)
    [sequence] = ranks.add(prompt(1, 4))
    for _ in range(2):
        with pytest.raises(RequestError, match="'request-0' already exists"):
            ranks.scheduler.add_sequence(sequence)
        ranks.schedule()
    ranks.drain()


def test_a_sequence_that_no_rank_could_hold_is_refused():
    ranks = SimulatedRanks(2, num_blocks=8, max_model_len=64)
    with pytest.raises(RequestError, match="may need 12 KV cache blocks of 4 tokens, and there are 8"):
        ranks.add(prompt(1, 40))


@pytest.mark.parametrize("known", [(True, True), (True, False), (False, False)])
def test_a_block_needs_no_fetching_only_if_every_rank_has_it(known: tuple[bool, bool]) -> None:
    ranks: list[Any] = [
        SimpleNamespace(block_size=4, search=None, is_known=lambda group, digest, knows=knows: knows) for knows in known
    ]
    assert DataRanksBlocks(ranks).is_known(0, b"digest") == all(known)
