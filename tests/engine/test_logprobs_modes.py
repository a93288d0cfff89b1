"""In each mode, what a request was sampled with is what another engine scores, bit for bit, with drafts and without."""

import pytest

from jaxis import LLM, SamplingParams
from jaxis.errors import RequestError
from jaxis.kernels import native
from jaxis.sampling_params import LOGPROBS_MODES
from tests.support.drafters import drafters, drafting

PROMPT = "One two three four. One two three four. One two three"
SAMPLED = {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "logit_bias": {40: 1.5}, "ignore_eos": True}
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def sampled(one_layer):
    """By mode and seed, what a request got; and the same requests with drafts, once that is called."""
    params = [
        SamplingParams(logprobs=3, logprobs_mode=mode, seed=seed, max_tokens=NUM_TOKENS, **how)
        for mode in LOGPROBS_MODES
        for seed, how in ((5, SAMPLED), (6, {**SAMPLED, "temperature": 0.0}))
    ]
    names = [(each.logprobs_mode, each.seed) for each in params]
    with LLM(one_layer, show_progress=False, kv_cache_memory="16MiB", max_num_seqs=8) as llm:
        with drafting(llm.engine, drafters({}, 256)["random"], 0):
            plain = llm.generate([PROMPT] * len(params), params)

        def drafted():
            answers = {}
            for output in plain:
                answers.setdefault(tuple(output.prompt_token_ids), []).append(output.outputs[0].token_ids)
            with drafting(llm.engine, drafters(answers, 256)["changing"], 5):
                return dict(zip(names, llm.generate([PROMPT] * len(params), params), strict=True))

        yield dict(zip(names, plain, strict=True)), drafted


def bits(entries):
    return [{token: (value.logprob.hex(), value.rank) for token, value in entry.items()} for entry in entries]


@pytest.mark.skipif(not native.usable(), reason="needs the native kernels")
def test_drafts_change_no_bit_in_any_mode(sampled):
    without, with_drafts = sampled[0], sampled[1]()
    counts = [(output.outputs[0].num_accepted_drafts, output.outputs[0].num_drafts) for output in with_drafts.values()]
    num_accepted, num_drafts = map(sum, zip(*counts, strict=True))
    assert 0 < num_accepted < num_drafts
    for name, output in without.items():
        [plain], [drafted] = output.outputs, with_drafts[name].outputs
        assert plain.num_drafts == 0
        assert plain.token_ids == drafted.token_ids
        assert bits(plain.logprobs) == bits(drafted.logprobs)
        assert plain.kept_mass == drafted.kept_mass


@pytest.mark.sampled(6)
@pytest.mark.skipif(not native.usable(), reason="needs the native kernels")
@pytest.mark.parametrize("mode", LOGPROBS_MODES)
def test_sampled_is_scored_in_another_engine(one_layer, sampled, mode):
    # The engine's own mode, in place of the request's.
    with LLM(
        one_layer,
        show_progress=False,
        kv_cache_memory="16MiB",
        max_num_batched_tokens=32,
        logprobs_mode=mode,
    ) as other:
        for seed, temperature in ((5, 0.8), (6, 0.0)):
            output = sampled[0][mode, seed]
            tokens = output.prompt_token_ids + output.outputs[0].token_ids
            params = SamplingParams(prompt_logprobs=3, max_tokens=1, **{**SAMPLED, "temperature": temperature})
            [scored] = other.generate([{"prompt_token_ids": tokens}], params)
            assert bits(scored.prompt_logprobs[-NUM_TOKENS:]) == bits(output.outputs[0].logprobs)


def test_the_kept_mass_leads_from_one_distribution_to_the_other(sampled):
    output = sampled[0]["processed_logprobs", 5].outputs[0]
    assert len(output.kept_mass) == NUM_TOKENS
    assert 0 < min(output.kept_mass) < max(output.kept_mass) <= 1
    assert sampled[0]["raw_logprobs", 5].outputs[0].kept_mass is None
    assert sampled[0]["processed_logits", 6].outputs[0].kept_mass == [1.0] * NUM_TOKENS  # greedy: no filters


def test_what_cannot_be_scored_is_refused_by_name(one_layer):
    with LLM(one_layer, show_progress=False, kv_cache_memory="16MiB") as llm:
        params = SamplingParams(prompt_logprobs=0, logprobs_mode="processed_logprobs", frequency_penalty=0.5)
        with pytest.raises(RequestError, match="frequency_penalty"):
            llm.generate("x", params)
    with pytest.raises(RequestError, match="logprobs_mode"):
        SamplingParams(logprobs_mode="normal")
