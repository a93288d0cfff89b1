"""Random lives of many sequences: what must hold after every operation, whatever came before."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.engine.scheduling.sequence import SequenceStatus
from jaxis.errors import RequestError
from tests.support.quick_rows import quick_rows
from tests.support.simulated_engine import VOCABULARY_SIZE, SimulatedEngine
from tests.support.simulated_store import SimulatedStore

SHARED_PREFIXES = [[5] * 40, [7, 8] * 20, list(range(1, 21)) * 2]


def add_if_it_fits(engine: SimulatedEngine, prompt: list[int], max_tokens: int, **arguments: object) -> None:
    """Adds the sequence, or sees it refused exactly if it could never run."""
    manager, max_model_len = engine.block_manager, engine.scheduler.max_model_len
    num_computed = min(len(prompt) + max_tokens, max_model_len) - 1
    fits = all(
        span.max_held_blocks(1, num_computed, manager.block_size, engine.scheduler.max_num_batched_tokens)
        <= pool.num_blocks
        for span, pool in zip(manager.spans, manager.pools, strict=True)
    )
    if fits and len(prompt) < max_model_len:
        engine.add(prompt, max_tokens=max_tokens, **arguments)
    else:
        with pytest.raises(RequestError):
            engine.add(prompt, max_tokens=max_tokens, **arguments)


spans = st.builds(
    AttentionSpan, st.one_of(st.none(), st.integers(1, 20)), st.one_of(st.none(), st.none(), st.integers(1, 20))
)


def full_context_first(num_blocks: dict[AttentionSpan, int]) -> dict[AttentionSpan, int]:
    return dict(sorted(num_blocks.items(), key=lambda item: item[0] != FULL_CONTEXT))


# Full context alone, and every mix of windows and chunks with and without it.
num_blocks = st.one_of(
    st.integers(3, 24),
    st.dictionaries(spans, st.integers(3, 24), min_size=1, max_size=3).map(full_context_first),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Any interleaving that the engine's contract allows."""

    @initialize(
        num_blocks=num_blocks,
        block_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 6),
        spare_budget=st.integers(0, 12),
        enable_prefix_caching=st.booleans(),
        num_state_slots=st.one_of(st.none(), st.integers(2, 12)),
        attends=st.sampled_from([True, True, True, False]),
        run_ahead=st.integers(0, 2),
        num_stages=st.sampled_from([1, 1, 2, 4]),
        store=st.one_of(st.none(), st.builds(SimulatedStore, st.integers(1, 40), saves_registered=st.booleans())),
        max_drafts=st.sampled_from([0, 1, 5]),
    )
    def start(
        self, max_num_seqs: int, spare_budget: int, attends: bool, num_state_slots: int | None, **arguments: object
    ) -> None:
        if not attends:
            arguments["num_blocks"], num_state_slots = {}, num_state_slots or 2
        arguments["num_state_slots"] = num_state_slots
        self.engine = SimulatedEngine(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_seqs + spare_budget, max_model_len=48, **arguments
        )

    @rule(
        prefix=st.sampled_from(SHARED_PREFIXES),
        prefix_length=st.integers(0, 24),
        suffix=st.lists(st.integers(0, VOCABULARY_SIZE - 1), min_size=1, max_size=4),
        max_tokens=st.integers(1, 12),
        priority=st.sampled_from([0, 0, 0, -1, 1]),
        client=st.sampled_from([None, None, "a", "b"]),
        cache_salt=st.sampled_from([None, None, "", "a"]),
        ignore_eos=st.booleans(),
        min_tokens=st.integers(0, 3),
        stop_token_ids=st.lists(st.integers(0, VOCABULARY_SIZE - 1), max_size=2),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
    )
    def add(
        self, prefix: list[int], prefix_length: int, suffix: list[int], max_tokens: int, min_tokens: int, **rest: object
    ) -> None:
        prompt = prefix[:prefix_length] + suffix
        add_if_it_fits(self.engine, prompt, max_tokens, min_tokens=min(min_tokens, max_tokens), **rest)

    @precondition(lambda self: len(self.engine.in_flight) <= self.engine.run_ahead)
    @rule()
    def schedule(self) -> None:
        self.engine.schedule()

    @precondition(lambda self: self.engine.in_flight)
    @rule()
    def update(self) -> None:
        self.engine.update()

    @rule(num_steps=st.integers(1, 10))
    def steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.engine.step()

    @precondition(lambda self: self.engine.unfinished)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.engine.finish(data.draw(st.sampled_from(self.engine.unfinished)))

    @rule()
    def reset_prefix_cache(self) -> None:
        self.engine.scheduler.block_manager.reset_prefix_cache()
        self.engine.check()
        assert self.engine.store is None or not self.engine.store.blocks

    @precondition(lambda self: self.engine.unfinished)
    @rule(data=st.data())
    def forget_prefix(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.engine.unfinished))
        self.engine.block_manager.forget_prefix(sequence)
        self.engine.check()
        for group in range(len(self.engine.block_manager.pools) + 1):
            pools = self.engine.block_manager._all_pools[group : group + 1]
            for digest in sequence.block_digests:
                assert all(pool.find(digest) is None for pool in pools)
                assert self.engine.store is None or not self.engine.store.has(group, digest)

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.drain()


SchedulerMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestScheduler = SchedulerMachine.TestCase


class TestSchedulerLong(SchedulerMachine.TestCase):
    settings = settings(SchedulerMachine.TestCase.settings, max_examples=2000, derandomize=False)


# What layers attend to, and whether some have a state.
MIXES = {
    "full": ((FULL_CONTEXT,), False),
    "full, window": ((FULL_CONTEXT, AttentionSpan(7)), False),
    "full, window, chunk": ((FULL_CONTEXT, AttentionSpan(3), AttentionSpan(None, 5)), False),
    "full, state": ((FULL_CONTEXT,), True),
    "full, window, state": ((FULL_CONTEXT, AttentionSpan(7)), True),
    "state": ((), True),
}
# Each other one is part of one of these.
RICHEST = [MIXES[name] for name in ("full, window, chunk", "full, window, state", "state")]


@pytest.mark.parametrize(("spans", "has_states"), quick_rows(MIXES.values(), RICHEST), ids=MIXES)
@pytest.mark.parametrize(("run_ahead", "max_drafts"), quick_rows([(0, 0), (1, 0), (2, 0), (0, 6), (1, 6)], [(1, 6)]))
@pytest.mark.parametrize("has_store", quick_rows([False, True], [True]))
def test_thousands_of_requests_in_scarce_blocks_return_what_each_would_alone(
    has_store: bool, run_ahead: int, max_drafts: int, spans: tuple[AttentionSpan, ...], has_states: bool
) -> None:
    rng = random.Random(run_ahead)
    num_sequences = num_preemptions = num_hits = num_loaded = num_drafted = num_accepted = 0
    while num_sequences < 400:
        engine = SimulatedEngine(
            num_blocks={span: rng.randint(6, 16) for span in spans},
            num_state_slots=rng.randint(2, 12) if has_states else None,
            block_size=rng.choice([2, 4]),
            max_num_seqs=6,
            max_num_batched_tokens=rng.choice([6, 8, 20]),
            max_model_len=24,
            run_ahead=run_ahead,
            store=SimulatedStore(rng.randint(4, 60), saves_registered=rng.random() < 0.5) if has_store else None,
            max_drafts=max_drafts,
        )
        for _ in range(60):
            if rng.random() < 0.6:
                prompt = [*rng.choice(SHARED_PREFIXES)[: rng.randint(0, 12)], rng.randrange(VOCABULARY_SIZE)]
                add_if_it_fits(
                    engine,
                    prompt,
                    rng.randint(1, 10),
                    priority=rng.choice([0, 0, 1]),
                    client=rng.choice([None, "a", "b"]),
                    cache_salt=rng.choice([None, "a"]),
                    ignore_eos=rng.random() < 0.5,
                    prompt_logprobs=rng.choice([None, None, None, 0]),
                )
            if engine.unfinished and rng.random() < 0.1:
                status = rng.choice([SequenceStatus.FINISHED_ABORTED, SequenceStatus.FINISHED_STOPPED])
                engine.finish(rng.choice(engine.unfinished), status)
            engine.step()
            if max_drafts and engine.in_flight and rng.random() < 0.2:
                engine.update()  # drafts follow known tokens only
        engine.drain()
        num_sequences += engine.num_sequences
        num_preemptions += sum(sequence.num_preemptions for sequence in engine.histories)
        num_hits += engine.block_manager.prefix_cache_hits
        num_loaded += engine.store.num_loaded if engine.store is not None else 0
        num_drafted += engine.num_drafted
        num_accepted += engine.num_accepted
    assert num_preemptions > 25 or not spans
    assert num_hits > 40
    assert num_loaded > 40 or not has_store
    assert (0.2 * num_drafted < num_accepted < num_drafted) == (max_drafts > 0)
