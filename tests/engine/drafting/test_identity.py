"""Whatever is drafted, an answer is what it is without: tokens, log-probabilities, text, finish reasons."""

from __future__ import annotations

import functools

import pytest

from jaxis import LLM, SamplingParams
from jaxis.kernels import native
from jaxis.structured_outputs import StructuredOutputs
from tests.support.drafters import TestDrafter, drafters, drafting, truth

PROMPTS = [
    "The quick brown fox",
    "A list of fruits: apple, pear, apple, pear, apple,",
    "1 2 3 4 5 6 7 8 9",
    "Once upon a time there was a river, and the river",
    "x",
]
KINDS = ("right", "wrong", "random", "out of range", "changing", "too long")


def params(**more: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 24, "temperature": 0.0, "logprobs": 3, **more})


PARAMS = {
    "greedy": params(),
    "greedy without log-probabilities": params(logprobs=None, ignore_eos=True),
    "drawn": params(temperature=0.7, seed=5, top_p=0.9),
    "hot": params(temperature=2.0, seed=9, ignore_eos=True, top_k=50, min_p=0.01),
    "penalties": params(frequency_penalty=0.7, presence_penalty=0.4, repetition_penalty=1.2, ignore_eos=True),
    "bans": params(bad_words=["the", "apple pear", " and"], logit_bias={5: 3.0, 70: -100}, temperature=1.0, seed=2),
    "allowed": params(allowed_token_ids=list(range(40, 90)), temperature=1.0, seed=4),
    "held back": params(min_tokens=12, stop_token_ids=list(range(0, 500, 3)), temperature=1.5, seed=8),
    "stop texts": params(stop=["e", "11"], min_tokens=5, temperature=1.0, seed=1),
    "stop text kept": params(stop=["ou"], include_stop_str_in_output=True, temperature=1.0, seed=3),
    "n": params(n=3, temperature=1.0, seed=6),
    "grammar": params(
        structured_outputs=StructuredOutputs(regex=r"(yes|no|maybe)(, (yes|no|maybe)){3,6}\."), temperature=1.5, seed=6
    ),
    "json": params(
        structured_outputs=StructuredOutputs(
            json_schema={
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yz"]}},
                "required": ["a", "b"],
            }
        ),
        temperature=1.0,
        seed=7,
        max_tokens=40,
    ),
    "prompt log-probabilities": params(prompt_logprobs=1, ignore_eos=True),
}


def answer(output) -> list[object]:
    """All that a request returns, floats by their bits."""
    found = []
    for completion in output.outputs:
        logprobs = [
            {token: (value.logprob.hex(), value.rank, value.decoded_token) for token, value in entry.items()}
            for entry in completion.logprobs or ()
        ]
        found.append(
            (list(completion.token_ids), completion.text, completion.finish_reason, completion.stop_reason, logprobs)
        )
    return found


@pytest.fixture(scope="module")
def llm(one_layer):
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 256, "kv_cache_memory": "16MiB"}
    with LLM(one_layer, **sizes, show_progress=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def plain(llm):
    """`plain(name)`: what requests of that name return without drafts, beside each other alone."""
    return functools.cache(lambda name: llm.generate(PROMPTS, PARAMS[name]))


def answers_of(outputs):
    return {
        tuple(output.prompt_token_ids): [list(completion.token_ids) for completion in output.outputs]
        for output in outputs
    }


def run(llm, plain, kind, names):
    """Runs the requests of some names together, with drafts; what came of each."""
    known = {}
    for name in names:
        for prompt, found in answers_of(plain(name)).items():
            known.setdefault(prompt, []).extend(found)
    drafter = drafters(known, llm.engine.runner.vocab_size)[kind]
    with drafting(llm.engine, drafter, 5) as speculation:
        found = llm.generate(PROMPTS * len(names), [PARAMS[name] for name in names for _ in PROMPTS])
    assert [answer(o) for o in found] == [answer(o) for name in names for o in plain(name)], names
    assert llm.engine.scheduler.block_manager.num_free_blocks == llm.engine.scheduler.block_manager.num_blocks
    return speculation.counts


def test_drafts_change_no_answer(llm, plain):
    names = ("greedy", "drawn", "penalties", "held back", "stop texts", "n", "grammar", "prompt log-probabilities")
    assert run(llm, plain, "right", names).num_accepted_tokens > 0


@pytest.mark.parametrize("kind", KINDS)
def test_no_drafts_change_any_answer(llm, plain, kind):
    for name in PARAMS:
        counts = run(llm, plain, kind, [name])
        if kind == "right":
            assert counts.num_accepted_tokens > 0, name
        if kind == "wrong":
            assert counts.num_accepted_tokens <= 0.2 * counts.num_draft_tokens


@pytest.mark.parametrize("max_drafts", [1, 7])
def test_right_drafts_give_one_token_more_each_step(llm, max_drafts):
    request = params(max_tokens=25, ignore_eos=True)
    [alone] = llm.generate(PROMPTS[3], request)
    engine = llm.engine
    with drafting(engine, TestDrafter(truth(answers_of([alone]))), max_drafts) as speculation:
        engine.add_request("oracle", alone.prompt_token_ids, request)
        lengths = []
        while engine.has_unfinished:
            lengths += [len(done.completions[0].sequence.output_token_ids) for done in engine.step()]
    # The prefill's token, the one of the step dispatched before that was read, then k + 1 each step, to the last.
    assert lengths == [1, *range(2, 25, 1 + max_drafts), 25]
    assert speculation.counts.num_accepted_tokens == speculation.counts.num_draft_tokens


@pytest.mark.parametrize("max_tokens", [1, 4, 7])
def test_a_completion_never_exceeds_max_tokens(llm, max_tokens):
    request = params(max_tokens=max_tokens, ignore_eos=True)
    whole = llm.generate(PROMPTS, params(max_tokens=20, ignore_eos=True))
    alone = llm.generate(PROMPTS, request)
    with drafting(llm.engine, TestDrafter(truth(answers_of(whole))), 5):
        found = llm.generate(PROMPTS, request)
    assert [answer(o) for o in found] == [answer(o) for o in alone]
    assert all(len(o.outputs[0].token_ids) == max_tokens for o in found)


@pytest.mark.skipif(not native.usable(), reason="without native kernels, equal only up to rounding")
@pytest.mark.parametrize("name", ["greedy", "drawn", "penalties"])
def test_sampled_log_probabilities_are_those_that_prompt_logprobs_scores(llm, plain, name):
    with drafting(llm.engine, TestDrafter(truth(answers_of(plain(name)))), 5):
        sampled = llm.generate(PROMPTS, PARAMS[name])
    for output in sampled:
        token_ids = output.outputs[0].token_ids
        [scored] = llm.generate(
            {"prompt_token_ids": [*output.prompt_token_ids, *token_ids]}, params(max_tokens=1, prompt_logprobs=3)
        )
        entries = [
            [{token: value.logprob.hex() for token, value in entry.items()} for entry in entries]
            for entries in (output.outputs[0].logprobs, scored.prompt_logprobs[-len(token_ids) :])
        ]
        assert entries[0] == entries[1]
