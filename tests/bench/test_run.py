"""Batches through an engine: how many steps, over how much context."""

import numpy as np
import pytest

from jaxis.bench.run import Load, check_load, random_prompts, run_batch
from jaxis.errors import RequestError


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def test_random_prompts_have_the_lengths_asked_for_and_differ(rng):
    prompts = random_prompts(rng, 50, [3, 40, 40])
    assert [len(prompt) for prompt in prompts] == [3, 40, 40]
    assert all(0 <= token < 50 for prompt in prompts for token in prompt)
    assert prompts[1] != prompts[2]


def test_a_lone_request_decodes_output_len_minus_one_steps_over_a_growing_context(llm, rng):
    run = run_batch(llm.engine, Load(batch_size=1, input_len=10, output_len=4), rng)
    assert len(run.step_seconds) == 3
    assert run.context_len == np.mean([11, 12, 13])
    assert len(run.first_token_seconds) == 1
    assert run.prefill_seconds > 0
    assert min(run.step_seconds) > 0


def test_steps_count_only_once_every_prompt_is_through(batching_llm, rng):
    # 4 * 40 tokens in chunks of 64: the first requests decode while the last are still in their prefill.
    run = run_batch(batching_llm.engine, Load(batch_size=4, input_len=40, output_len=5), rng)
    assert len(run.step_seconds) == 4
    assert len(run.first_token_seconds) == 4
    assert len(set(run.first_token_seconds)) > 1
    assert run.prefill_seconds == max(run.first_token_seconds)
    assert 40 + 2.5 < run.context_len < 40 + 2.5 + 3


def test_one_output_token_is_a_prefill_alone(llm, rng):
    run = run_batch(llm.engine, Load(1, 10, 1), rng)
    assert run.step_seconds == []
    assert run.context_len == 0
    assert len(run.first_token_seconds) == 1


def test_the_engine_is_idle_afterwards(llm, rng):
    run_batch(llm.engine, Load(1, 10, 3), rng)
    assert not llm.engine.has_unfinished
    assert llm.engine.step() == []


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("load", "words"),
    [
        (Load(9, 4, 2), "max_num_seqs=8"),
        (Load(1, 100_000, 2), "max_model_len="),
        (Load(8, 200, 2), "kv_cache_memory"),
    ],
    ids=["requests", "length", "cache"],
)
def test_a_load_too_large_for_the_engine_is_one_clear_error(start_llm, load, words):
    with start_llm(max_num_seqs=8, kv_cache_memory="64KiB" if words == "kv_cache_memory" else "8MiB") as llm:
        if words == "kv_cache_memory":
            load = Load(8, llm.max_model_len - 60, 2)
        with pytest.raises(RequestError, match=words):
            check_load(llm.engine, load)


def test_the_longest_sequence_leaves_room_for_decodes_beside_the_prefill():
    # 8 prompts of 100 tokens, 64 - 7 of them a step at worst: 15 steps.
    assert Load(8, 100, 20).max_len(max_num_batched_tokens=64) == 100 + 15 + 20 + 1
