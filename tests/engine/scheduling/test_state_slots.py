"""The slots of recurrent states: where a step reads and writes them, and which states are kept for which prefixes."""

from __future__ import annotations

import pytest

from jaxis.config.attention_span import FULL_CONTEXT
from jaxis.engine.scheduling import state_slots
from jaxis.engine.scheduling.block_manager import BlockManager
from jaxis.engine.scheduling.sequence import NO_SLOT
from jaxis.errors import ConfigError
from tests.support.simulated_engine import VOCABULARY_SIZE, SimulatedEngine, sample

BLOCK = 4


def make_engine(**arguments: object) -> SimulatedEngine:
    defaults = {"num_blocks": 64, "block_size": BLOCK, "num_state_slots": 12, "max_model_len": 200}
    return SimulatedEngine(**defaults | arguments)


def run(engine: SimulatedEngine, prompt: list[int], max_tokens: int = 1) -> int:
    """Runs a prompt to its end; returns how many of its tokens were found in the cache."""
    sequence = engine.add(prompt, max_tokens=max_tokens)
    engine.drain()
    return sequence.num_cached_tokens


def test_a_sequence_reads_what_it_wrote_and_begins_with_nothing() -> None:
    engine = make_engine(max_num_batched_tokens=6, enable_prefix_caching=False)
    engine.add(list(range(10)), max_tokens=3)
    steps = []
    while (output := engine.step()) is not None:
        steps += [entry.state for entry in output.scheduled]
    [own] = {step.write for step in steps}
    assert [step.read for step in steps] == [NO_SLOT] + [own] * (len(steps) - 1)
    assert {step.keep for step in steps} == {NO_SLOT}


@pytest.mark.parametrize("length", [9, 12, 30, 31, 32, 33])
def test_a_prompt_that_is_asked_for_again_computes_only_what_follows_its_last_whole_block(length: int) -> None:
    engine = make_engine(max_num_batched_tokens=64)
    prompt = [i % 20 for i in range(length)]
    assert run(engine, prompt) == 0
    assert run(engine, prompt) == (length - 1) // BLOCK * BLOCK


def test_a_next_turn_finds_all_blocks_of_the_answer_before() -> None:
    engine = make_engine(max_num_batched_tokens=64)
    first = engine.add([1, 2, 3, 4, 5, 6, 7], max_tokens=20)
    engine.drain()
    turn = first.prompt_token_ids + first.output_token_ids + [3, 3]
    # The last token was sampled and never computed.
    assert run(engine, turn) == (7 + 20 - 1) // BLOCK * BLOCK


def test_where_prompts_part_a_state_is_kept_as_soon_as_the_second_one_comes() -> None:
    engine = make_engine(max_num_batched_tokens=64)
    shared = [i % 20 for i in range(40)]
    # Only the state after the first prompt's last block is kept, and no other prompt has that.
    assert run(engine, [*shared, 1, 2, 3, 4, 5, 6]) == 0
    assert run(engine, [*shared, 7, 8, 9, 7, 8, 9]) == 0
    assert run(engine, [*shared, 3, 3, 3, 3, 3, 3]) == 40


def test_a_long_prompt_keeps_a_state_every_so_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_slots, "KEPT_STATE_INTERVAL", 32)
    engine = make_engine(max_num_batched_tokens=8, max_model_len=200)
    prompt = [i % 20 for i in range(150)]
    run(engine, prompt)
    manager = engine.block_manager
    sequence = engine.add([*prompt[:149], 23], max_tokens=1)
    digests = manager._digests(sequence, 37)
    kept = [n * BLOCK for n in range(1, 38) if manager.states.pool.find(digests[n - 1]) is not None]
    # The last of each 32 tokens, and the last of all.
    assert kept == [24, 56, 88, 120, 148]
    engine.drain()
    assert sequence.num_cached_tokens == 148


def test_with_fewer_slots_than_sequences_they_wait_for_one() -> None:
    engine = make_engine(num_state_slots=3, max_num_seqs=6)
    sequences = [engine.add([i, 1, 2, 3, 4, 5], max_tokens=6) for i in range(6)]
    most = 0
    while engine.unfinished:
        engine.step()
        most = max(most, engine.scheduler.num_running)
    engine.drain()
    assert most <= 3
    assert all(len(sequence.output_token_ids) == 6 for sequence in sequences)


def test_a_reset_cache_keeps_no_state() -> None:
    engine = make_engine(max_num_batched_tokens=64)
    prompt = list(range(20))
    run(engine, prompt)
    engine.block_manager.reset_prefix_cache()
    assert run(engine, prompt) == 0


def test_one_slot_is_too_few() -> None:
    with pytest.raises(ConfigError, match="recurrent states need at least 2 slots, not 1"):
        BlockManager({FULL_CONTEXT: 4}, BLOCK, num_state_slots=1)


def decodes_with_drafts(num_right: int, num_drafts: int, **arguments: object) -> list[tuple[int, int, int]]:
    """(start, known tokens, drafts) of the decodes of a sequence, when so many of its drafts are right each time."""
    engine = make_engine(**{"max_num_batched_tokens": 64, "block_size": 64, "max_drafts": num_drafts} | arguments)
    sequence = engine.add([1, 2, 3, 4, 5], max_tokens=30)

    def drafts() -> dict[object, list[int]]:
        tokens = list(engine.histories[sequence])
        for place in range(num_drafts):
            tokens.append((sample(tokens) + (place >= num_right)) % VOCABULARY_SIZE)
        return {sequence.seq_id: tokens[-num_drafts:]}

    engine._drafts = drafts
    steps = []
    while engine.unfinished:
        [entry] = engine.step().scheduled
        steps.append((entry.start, entry.num_tokens - entry.num_drafts, entry.num_drafts))
    engine.drain()
    return steps[1:]


def test_where_all_drafts_are_right_or_none_is_no_token_is_computed_again() -> None:
    assert decodes_with_drafts(4, 4)[:3] == [(5, 1, 4), (10, 1, 4), (15, 1, 4)]
    assert decodes_with_drafts(0, 4)[:3] == [(5, 1, 4), (6, 1, 4), (7, 1, 4)]


def test_right_drafts_before_a_wrong_one_are_computed_again_with_the_next_ones() -> None:
    assert decodes_with_drafts(2, 4)[:4] == [(5, 1, 4), (6, 3, 4), (9, 3, 4), (12, 3, 4)]


def test_with_wrong_drafts_at_the_end_of_a_block_few_tokens_are_computed_again() -> None:
    steps = decodes_with_drafts(0, 4, block_size=8)
    assert max(known for _, known, _ in steps) == 2


def test_without_two_slots_to_spare_nothing_is_drafted() -> None:
    assert decodes_with_drafts(2, 4, num_state_slots=3)[:2] == [(5, 1, 4), (6, 3, 4)]
    assert decodes_with_drafts(2, 4, num_state_slots=2)[:2] == [(5, 1, 0), (6, 1, 0)]
