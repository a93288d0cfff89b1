"""Every sampling parameter changes what LLM.generate returns in the way it says, or is refused."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from jaxis import SamplingParams, StructuredOutputs
from jaxis.errors import RequestError

PROMPT = "the cat reads"
GREEDY = {"temperature": 0.0, "max_tokens": 20}
SAMPLED = {"temperature": 4.0, "max_tokens": 20, "seed": 0}


def complete(llm, **params):
    """The one completion of PROMPT."""
    [output] = llm.generate(PROMPT, SamplingParams(**params))
    [completion] = output.outputs
    return completion


@pytest.fixture
def greedy(llm):
    """The greedy completion of PROMPT with its 20 most likely tokens, likeliest first, at each step."""
    return complete(llm, **GREEDY, logprobs=20)


def likeliest(completion, step):
    return sorted(completion.logprobs[step], key=lambda token_id: completion.logprobs[step][token_id].rank)


def test_every_parameter_has_a_test_here():
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert {field.name for field in dataclasses.fields(SamplingParams)} <= tested


def test_logprobs_mode(llm):
    """More of it: tests/engine/test_logprobs_modes.py."""
    completion = complete(llm, **SAMPLED, top_k=3, logprobs=5, logprobs_mode="processed_logprobs")
    probabilities = [[math.exp(each.logprob) for each in step.values()] for step in completion.logprobs]
    assert all(sum(each) == pytest.approx(1, abs=1e-5) for each in probabilities)
    with pytest.raises(RequestError, match="logprobs_mode"):
        SamplingParams(logprobs_mode="raw")


def test_return_routed_experts(llm):
    """More of it: tests/engine/test_routed_experts.py."""
    with pytest.raises(RequestError, match="return_routed_experts cannot be given"):
        complete(llm, **GREEDY, return_routed_experts=True)
    assert complete(llm, **GREEDY, return_routed_experts=False).routed_experts is None


def test_routed_experts_prompt_start(llm):
    """More of it: tests/engine/test_routed_experts.py."""
    assert complete(llm, **GREEDY, routed_experts_prompt_start=3).routed_experts is None
    with pytest.raises(RequestError, match="routed_experts_prompt_start"):
        SamplingParams(routed_experts_prompt_start=-1)


def test_thinking_token_budget(llm):
    """More of it: tests/engine/grammar/test_thinking_budget.py."""
    with pytest.raises(RequestError, match="thinking_token_budget=5 cannot be honoured"):
        complete(llm, **GREEDY, thinking_token_budget=5)
    assert SamplingParams(thinking_token_budget=-1) == SamplingParams()
    with pytest.raises(RequestError, match="thinking_token_budget"):
        SamplingParams(thinking_token_budget=-2)


def test_thinking_budget_grace_period(llm):
    """More of it: tests/engine/grammar/test_thinking_budget.py."""
    [plain], [without_budget] = (
        llm.generate(PROMPT, SamplingParams(**SAMPLED, thinking_budget_grace_period=number)) for number in (0, 9)
    )
    assert without_budget.outputs[0].token_ids == plain.outputs[0].token_ids


def test_num_speculative_tokens(llm):
    """More of it: tests/engine/drafting."""
    [plain], [limited] = (
        llm.generate(PROMPT, SamplingParams(**SAMPLED, num_speculative_tokens=number)) for number in (None, 0)
    )
    assert limited.outputs[0].token_ids == plain.outputs[0].token_ids
    with pytest.raises(RequestError, match="num_speculative_tokens"):
        SamplingParams(num_speculative_tokens=-1)


def test_extra_args(llm):
    """More of it: tests/engine/test_kv_transfer.py."""
    params = SamplingParams(extra_args={"kv_transfer_params": {"do_remote_decode": True}})
    with pytest.raises(RequestError, match="kv_transfer_params needs an engine with kv_transfer_config"):
        llm.generate(PROMPT, params)
    with pytest.raises(RequestError, match="extra_args"):
        SamplingParams(extra_args={"other": 1})


def test_prediction(llm):
    """More of it: tests/engine/drafting."""
    [plain], [predicted] = (
        llm.generate(PROMPT, SamplingParams(**SAMPLED, prediction=prediction)) for prediction in (None, [5, 6, 7])
    )
    assert predicted.outputs[0].token_ids == plain.outputs[0].token_ids
    with pytest.raises(RequestError, match="prediction"):
        SamplingParams(prediction=3)


def test_unknown_parameter():
    with pytest.raises(TypeError, match="beam_width"):
        SamplingParams(beam_width=4)


def test_n(llm):
    [output] = llm.generate(PROMPT, SamplingParams(**SAMPLED, n=3))
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3
    [first] = llm.generate(PROMPT, SamplingParams(**SAMPLED))
    assert output.outputs[0].token_ids == first.outputs[0].token_ids


def test_temperature(llm, greedy):
    assert complete(llm, temperature=1e-4, max_tokens=20, seed=3).token_ids == greedy.token_ids
    assert complete(llm, **SAMPLED).token_ids != greedy.token_ids


def test_seed(llm):
    assert complete(llm, **SAMPLED).token_ids == complete(llm, **SAMPLED).token_ids
    assert complete(llm, **SAMPLED).token_ids != complete(llm, **SAMPLED | {"seed": 1}).token_ids
    unseeded = SAMPLED | {"seed": None}
    assert complete(llm, **unseeded).token_ids != complete(llm, **unseeded).token_ids


def test_top_k(llm, greedy):
    assert complete(llm, **SAMPLED, top_k=1).token_ids == greedy.token_ids
    completion = complete(llm, **SAMPLED, top_k=3, logprobs=20)
    ranks = [entry[token_id].rank for token_id, entry in zip(completion.token_ids, completion.logprobs, strict=True)]
    assert set(ranks) == {1, 2, 3}
    assert complete(llm, **SAMPLED, top_k=-1).token_ids == complete(llm, **SAMPLED, top_k=0).token_ids


def test_top_p(llm, greedy):
    assert complete(llm, **SAMPLED, top_p=1e-6).token_ids == greedy.token_ids
    completion = complete(llm, **SAMPLED | {"temperature": 1.0}, top_p=0.7, logprobs=20)
    for token_id, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        more_likely = sum(np.exp(other.logprob) for other in entry.values() if other.rank < entry[token_id].rank)
        assert more_likely < 0.7
    assert {entry[i].rank for i, entry in zip(completion.token_ids, completion.logprobs, strict=True)} != {1}


def test_min_p(llm, greedy):
    assert complete(llm, **SAMPLED, min_p=1.0).token_ids == greedy.token_ids
    completion = complete(llm, **SAMPLED, min_p=0.4, logprobs=1)
    for token_id, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        best = max(other.logprob for other in entry.values())
        assert (entry[token_id].logprob - best) / SAMPLED["temperature"] >= np.log(0.4)
    assert completion.token_ids != greedy.token_ids


FEW = list(range(40, 52))  # so few that the model repeats itself at once


def check_penalized(llm, penalize, **penalty):
    """The completion is what arg-max gives after `penalize(logits, counts in the output, whether in the prompt)`."""
    prompt = [*llm.tokenizer.encode(PROMPT), FEW[0]]
    params = SamplingParams(**GREEDY, allowed_token_ids=FEW, **penalty)
    token_ids = llm.generate(prompt, params)[0].outputs[0].token_ids
    logits = llm.compute_logits(prompt + token_ids)[len(prompt) - 1 :, FEW]
    in_prompt = np.isin(FEW, prompt)
    for step, token_id in enumerate(token_ids):
        counts = np.asarray([token_ids[:step].count(other) for other in FEW])
        assert token_id == FEW[np.argmax(penalize(logits[step], counts, in_prompt))]
    assert token_ids != [FEW[i] for i in np.argmax(logits[:-1], axis=-1)]
    return token_ids


def test_frequency_penalty(llm):
    tokens = check_penalized(llm, lambda logits, counts, _: logits - 1.5 * counts, frequency_penalty=1.5)
    assert len(set(tokens)) > 6
    check_penalized(llm, lambda logits, counts, _: logits + 0.25 * counts, frequency_penalty=-0.25)


def test_presence_penalty(llm):
    check_penalized(llm, lambda logits, counts, _: logits - 1.5 * (counts > 0), presence_penalty=1.5)


def test_repetition_penalty(llm):
    """The prompt's tokens are penalized too, before they were generated."""

    def penalize(logits, counts, in_prompt):
        return np.where((counts > 0) | in_prompt, np.where(logits > 0, logits / 4, logits * 4), logits)

    check_penalized(llm, penalize, repetition_penalty=4.0)


def test_logit_bias(llm, greedy):
    assert complete(llm, **GREEDY, logit_bias={9: 100.0}).token_ids == [9] * 20
    best, second = likeliest(greedy, 0)[:2]
    assert complete(llm, **GREEDY, logit_bias={best: -100.0}).token_ids[0] == second
    with pytest.raises(RequestError, match="logit_bias holds 512"):
        complete(llm, logit_bias={512: 1.0})


def test_allowed_token_ids(llm, greedy):
    ranking = likeliest(greedy, 0)
    allowed = [ranking[5], ranking[3], ranking[9]]
    completion = complete(llm, **GREEDY, allowed_token_ids=allowed)
    assert completion.token_ids[0] == ranking[3]
    assert set(completion.token_ids) <= set(allowed)
    with pytest.raises(RequestError, match="allowed_token_ids holds 600"):
        complete(llm, allowed_token_ids=[600])


def test_bad_words(llm):
    first, second = llm.tokenizer.encode("zq", add_special_tokens=False)
    only_these = {**SAMPLED, "allowed_token_ids": [first, second]}
    assert (first, second) in set(itertools.pairwise(complete(llm, **only_these).token_ids))
    # A word of two tokens: once the first has come, the second may not.
    tokens = complete(llm, **only_these, bad_words=["zq"]).token_ids
    start = tokens.index(first)
    assert tokens == [second] * start + [first] * (len(tokens) - start)
    # A word of one token.
    assert complete(llm, **only_these, bad_words=["z"]).token_ids == [second] * 20


def test_max_tokens(llm):
    assert len(complete(llm, temperature=0.0, max_tokens=5).token_ids) == 5
    completion = complete(llm, temperature=0.0, max_tokens=None)
    assert len(completion.token_ids) == llm.max_model_len - len(llm.tokenizer.encode(PROMPT))
    assert completion.finish_reason == "length"


def test_min_tokens(llm, greedy):
    """Stop tokens cannot be sampled, and stop texts do not count, before there are so many tokens."""
    [end, *_] = greedy.token_ids
    assert complete(llm, **GREEDY, stop_token_ids=[end]).token_ids == [end]
    held_back = complete(llm, **GREEDY, stop_token_ids=[end], min_tokens=10)
    assert held_back.token_ids[0] == likeliest(greedy, 0)[1]
    assert end not in held_back.token_ids[:10]
    always = {**GREEDY, "logit_bias": {llm.tokenizer.encode("z")[0]: 100.0}}
    assert complete(llm, **always, stop=["zz"]).text == ""
    completion = complete(llm, **always, stop=["zz"], min_tokens=7)
    assert completion.text == "z" * 7
    assert len(completion.token_ids) == 9
    assert completion.stop_reason == "zz"


def test_stop(llm, greedy):
    [text] = [greedy.text[4:7]]
    completion = complete(llm, **GREEDY, stop=[text, "not in it"])
    assert completion.text == greedy.text[: greedy.text.index(text)]
    assert completion.finish_reason == "stop"
    assert completion.stop_reason == text
    assert completion.token_ids == greedy.token_ids[: len(completion.token_ids)]
    assert len(completion.token_ids) < len(greedy.token_ids)
    assert complete(llm, **GREEDY, stop=text).text == completion.text


def test_stop_token_ids(llm, greedy):
    end = greedy.token_ids[6]
    first = greedy.token_ids.index(end)
    completion = complete(llm, **GREEDY, stop_token_ids=[end])
    assert completion.token_ids == greedy.token_ids[: first + 1]
    assert completion.finish_reason == "stop"
    assert completion.stop_reason == end
    assert completion.text == llm.tokenizer.decode(greedy.token_ids[:first])
    with pytest.raises(RequestError, match="stop_token_ids holds 512"):
        complete(llm, stop_token_ids=[512])


def test_ignore_eos(llm):
    [eos] = llm.engine.eos_token_ids
    completion = complete(llm, **GREEDY, logit_bias={eos: 100.0})
    assert completion.token_ids == [eos]
    assert completion.finish_reason == "stop"
    assert completion.stop_reason is None
    assert complete(llm, **GREEDY, logit_bias={eos: 100.0}, ignore_eos=True).token_ids == [eos] * 20


def test_include_stop_str_in_output(llm, greedy):
    text = greedy.text[4:7]
    end = greedy.text.index(text) + len(text)
    assert complete(llm, **GREEDY, stop=[text], include_stop_str_in_output=True).text == greedy.text[:end]
    [end] = llm.tokenizer.encode("z")
    ended = {**GREEDY, "logit_bias": {end: 100.0}, "stop_token_ids": [end]}
    assert complete(llm, **ended).text == ""
    assert complete(llm, **ended, include_stop_str_in_output=True).text == "z"


def test_logprobs(llm, greedy):
    """Their values: test_reference.py."""
    assert [len(entry) for entry in greedy.logprobs] == [20] * 20
    assert complete(llm, **GREEDY).logprobs is None
    assert complete(llm, **GREEDY).cumulative_logprob is None
    assert [len(entry) for entry in complete(llm, **GREEDY, logprobs=0).logprobs] == [1] * 20


def test_prompt_logprobs(llm):
    """Their values: test_reference.py."""
    [output] = llm.generate(PROMPT, SamplingParams(**GREEDY, prompt_logprobs=1))
    assert output.prompt_logprobs[0] is None
    assert all(len(entry) in (1, 2) for entry in output.prompt_logprobs[1:])
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert llm.generate(PROMPT, SamplingParams(**GREEDY))[0].prompt_logprobs is None


def test_detokenize(llm, greedy):
    completion = complete(llm, **GREEDY, detokenize=False)
    assert completion.text == ""
    assert completion.token_ids == greedy.token_ids
    assert greedy.text == llm.tokenizer.decode(greedy.token_ids)
    with pytest.raises(RequestError, match="stop needs text"):
        SamplingParams(detokenize=False, stop=["a"])


def test_skip_special_tokens(llm):
    special = llm.tokenizer.token_to_id("<|im_start|>")
    params = {"temperature": 0.0, "max_tokens": 2, "logit_bias": {special: 100.0}}
    assert complete(llm, **params).text == ""
    assert complete(llm, **params, skip_special_tokens=False).text == "<|im_start|>" * 2


def test_structured_outputs(llm, greedy):
    """More of it: test_structured_output_at_work.py."""
    completion = complete(llm, **GREEDY, structured_outputs=StructuredOutputs(choice=["the mat", "the bird"]))
    assert completion.text in ("the mat", "the bird")
    assert completion.finish_reason == "stop"
    assert not greedy.text.startswith("the ")
