"""Drafts in sequences that are preempted, aborted, stopped or found in the prefix cache: answers stay as without."""

import dataclasses
from collections.abc import Sequence

import pytest

from jaxis import LLM, SamplingParams
from tests.support.drafters import TestDrafter, drafters, drafting, truth
from tests.support.parity import checkpoint_folder
from tests.support.prediction_checkpoints import family

PROMPTS = ["The quick brown fox", "A list of fruits: apple, pear,", "1 2 3 4 5 6", "Once upon a time there was"]
NUM_TOKENS = 40
MAX_DRAFTS = 5
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(
    scope="module", params=[16, pytest.param(1, marks=pytest.mark.slow)], ids=lambda size: f"blocks of {size}"
)
def llm(request, one_layer):
    """With memory for about two of the prompts' answers."""
    with LLM(
        one_layer,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        max_model_len=64,
        kv_cache_memory="64KiB",
        block_size=request.param,
        show_progress=False,
    ) as llm:
        yield llm


@pytest.fixture(scope="module")
def plain(llm):
    """Each prompt's output, by token ids of the prompt; made one after the other, without drafts."""
    return {tuple(o.prompt_token_ids): o.outputs[0] for [o] in (llm.generate([p], GREEDY) for p in PROMPTS)}


@pytest.fixture(scope="module")
def known(plain):
    return {prompt: [output.token_ids] for prompt, output in plain.items()}


def all_blocks_are_free(llm):
    blocks = llm.engine.scheduler.block_manager
    return blocks.num_free_blocks == blocks.num_blocks


@pytest.mark.parametrize("kind", ["right", "changing", "too long"])
def test_preempted(llm, plain, known, kind):
    before = llm.engine.num_preemptions
    with drafting(llm.engine, drafters(known, llm.engine.runner.vocab_size)[kind], MAX_DRAFTS) as speculation:
        outputs = llm.generate(PROMPTS, GREEDY)
    assert [o.outputs[0].token_ids for o in outputs] == [output.token_ids for output in plain.values()]
    assert llm.engine.num_preemptions > before
    assert speculation.counts.num_accepted_tokens > 0
    assert all_blocks_are_free(llm)


def test_aborted_after_any_number_of_steps(llm, plain, known):
    prompts = list(plain)[:2]
    with drafting(llm.engine, drafters(known, llm.engine.runner.vocab_size)["changing"], MAX_DRAFTS):
        for num_steps in (1, 2, 3, 6):
            kept, dropped = (llm.engine.add_request(f"{num_steps} {i}", list(p), GREEDY) for i, p in enumerate(prompts))
            for _ in range(num_steps):
                llm.engine.step()
            llm.engine.abort_request(dropped.request_id)
            while llm.engine.has_unfinished:
                llm.engine.step()
            assert kept.output().outputs[0].token_ids == plain[prompts[0]].token_ids
            assert all_blocks_are_free(llm)


@pytest.mark.parametrize("place", range(MAX_DRAFTS))
def test_right_up_to_any_place(llm, plain, known, place):
    vocab_size, right = llm.engine.runner.vocab_size, truth(known)

    def guess(prompt: list[int], output: list[int], limit: int) -> Sequence[int]:
        draft = list(right(prompt, output, limit))
        return [(token + (i == place)) % vocab_size for i, token in enumerate(draft)]

    [prompt] = list(plain)[:1]
    with drafting(llm.engine, TestDrafter(guess), MAX_DRAFTS) as speculation:
        [found] = llm.generate([{"prompt_token_ids": list(prompt)}], GREEDY)
    counts = speculation.counts
    assert found.outputs[0].token_ids == plain[prompt].token_ids
    assert len(counts.num_accepted_by_position) == MAX_DRAFTS
    assert counts.num_accepted_by_position[place] == 0
    assert counts.num_accepted_tokens >= place * (NUM_TOKENS // (place + 1) - 2)


def test_a_drafter_without_guesses(llm, plain):
    with drafting(llm.engine, TestDrafter(lambda prompt, output, limit: []), MAX_DRAFTS) as speculation:
        outputs = llm.generate(PROMPTS, GREEDY)
    assert [o.outputs[0].token_ids for o in outputs] == [output.token_ids for output in plain.values()]
    assert speculation.counts.num_drafts == 0


def test_a_prefix_that_ends_within_drafts_is_found_without_them(llm, plain):
    """Drafts that were wrong lay in the blocks whose tokens another prompt now repeats."""
    prompt, output = next(iter(plain.items()))
    wrong = TestDrafter(lambda prompt, output, limit: [3] * limit)
    for num_shared in range(10, 30, 3):
        llm.engine.reset_prefix_cache()
        with drafting(llm.engine, wrong, MAX_DRAFTS):
            llm.generate([{"prompt_token_ids": list(prompt)}], GREEDY)
            longer = {"prompt_token_ids": [*prompt, *output.token_ids[:num_shared]]}
            [found] = llm.generate([longer], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
        assert found.num_cached_tokens > 0 or len(prompt) + num_shared <= 16
        assert found.outputs[0].token_ids == output.token_ids[num_shared : num_shared + 8]


def test_stopped_within_drafts(llm, plain, known):
    prompt, output = next(iter(plain.items()))
    for place in range(1, 14, 3):
        for stop in ({"stop_token_ids": [output.token_ids[place]]}, {"stop": [output.text[place : place + 3]]}):
            params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, **stop)
            [alone] = llm.generate([{"prompt_token_ids": list(prompt)}], params)
            with drafting(llm.engine, TestDrafter(truth(known)), MAX_DRAFTS):
                [found] = llm.generate([{"prompt_token_ids": list(prompt)}], params)
            of_drafts = {"num_drafts": 0, "num_accepted_drafts": 0}
            assert dataclasses.replace(found.outputs[0], **of_drafts) == alone.outputs[0]
            assert len(found.outputs[0].token_ids) < NUM_TOKENS
    assert all_blocks_are_free(llm)


def test_streamed_several_tokens_at_a_time(llm, plain, known):
    prompt, output = next(iter(plain.items()))
    with drafting(llm.engine, TestDrafter(truth(known)), MAX_DRAFTS):
        parts = list(llm.stream({"prompt_token_ids": list(prompt)}, GREEDY))
    assert "".join(part.text for part in parts) == output.text
    assert len(parts) < NUM_TOKENS / 3


@pytest.mark.parametrize("block_size", [16, 1])
def test_a_window_shorter_than_the_drafts(block_size):
    folder = checkpoint_folder(family("Mistral, window", sliding_window=4))
    prompts = [{"prompt_token_ids": list(range(1, 1 + n))} for n in (2, 23)]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    settings = {"max_num_seqs": 2, "max_model_len": 64, "kv_cache_memory": "2MiB", "show_progress": False}
    with LLM(folder, block_size=block_size, **settings) as llm:
        alone = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
        known = {tuple(p["prompt_token_ids"]): [ids] for p, ids in zip(prompts, alone, strict=True)}
        for kind in ("right", "changing"):
            with drafting(llm.engine, drafters(known, 131)[kind], 7) as speculation:
                assert [o.outputs[0].token_ids for o in llm.generate(prompts, params)] == alone
            assert speculation.counts.num_accepted_tokens > 0
        assert all_blocks_are_free(llm)
