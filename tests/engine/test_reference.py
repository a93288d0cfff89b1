"""Tokens, log-probabilities and logits of a served model against transformers."""

import numpy as np
import pytest
import torch
import transformers

from jaxis import SamplingParams
from jaxis.errors import EngineError, RequestError

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def reference(checkpoint):
    """transformers' model of a family in float32, made once."""
    models = {}

    def load(family="qwen3"):
        if family not in models:
            folder = checkpoint(family)
            models[family] = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return models[family]

    return load


@torch.no_grad()
def reference_logits(model, token_ids):
    return model(torch.tensor([token_ids])).logits[0].numpy()


def reference_logprobs(model, token_ids):
    return torch.log_softmax(torch.from_numpy(reference_logits(model, token_ids)), dim=-1).numpy()


@torch.no_grad()
def reference_greedy(model, token_ids, max_new_tokens):
    output = model.generate(torch.tensor([token_ids]), max_new_tokens=max_new_tokens, do_sample=False)
    return output[0, len(token_ids) :].tolist()


def random_ids(length, seed=0):
    return np.random.default_rng(seed).integers(0, 512, length).tolist()


def check_entry(entry, expected, token_id, num_wanted):
    """A position's log-probabilities against those of the whole vocabulary, float32 [V]."""
    order = np.argsort(-expected)
    assert set(entry) == {token_id, *order[:num_wanted].tolist()}
    assert next(iter(entry)) == token_id
    for other, logprob in entry.items():
        np.testing.assert_allclose(logprob.logprob, expected[other], atol=TOLERANCE)
        assert logprob.rank == 1 + order.tolist().index(other)


def test_greedy_tokens(llm, reference):
    prompts = [random_ids(length, length) for length in (1, 5, 40, 90)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=30))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == reference_greedy(reference(), prompt, 30)
        assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("num_logprobs", [0, 5, 20])
def test_logprobs(llm, reference, num_logprobs):
    prompt = random_ids(9)
    params = SamplingParams(temperature=1.3, seed=0, max_tokens=8, logprobs=num_logprobs)
    [completion] = llm.generate(prompt, params)[0].outputs
    expected = reference_logprobs(reference(), prompt + completion.token_ids)
    assert len(completion.logprobs) == len(completion.token_ids) == 8
    total = 0.0
    for i, (token_id, entry) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
        check_entry(entry, expected[len(prompt) - 1 + i], token_id, num_logprobs)
        assert entry[token_id].decoded_token == llm.tokenizer.token_text(token_id)
        total += expected[len(prompt) - 1 + i, token_id]
    np.testing.assert_allclose(completion.cumulative_logprob, total, atol=1e-3)


def test_logprobs_are_of_the_distribution_before_any_parameter(llm, reference):
    prompt = random_ids(9)
    params = SamplingParams(
        temperature=0, max_tokens=4, logprobs=3, logit_bias={5: 90.0}, repetition_penalty=1.3, frequency_penalty=0.4
    )
    [completion] = llm.generate(prompt, params)[0].outputs
    assert 5 in completion.token_ids
    expected = reference_logprobs(reference(), prompt + completion.token_ids)
    for i, (token_id, entry) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
        check_entry(entry, expected[len(prompt) - 1 + i], token_id, 3)


@pytest.mark.parametrize(("length", "num_logprobs"), [(1, 2), (13, 0), (13, 4), (150, 2)])
def test_prompt_logprobs(llm, reference, length, num_logprobs):
    """150 tokens take three steps of at most 64."""
    prompt = random_ids(length)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=num_logprobs)
    for _ in range(2):  # the second time, the prompt is in the prefix cache
        [output] = llm.generate(prompt, params)
        assert len(output.prompt_logprobs) == length
        assert output.prompt_logprobs[0] is None
        expected = reference_logprobs(reference(), prompt)
        for i in range(1, length):
            check_entry(output.prompt_logprobs[i], expected[i - 1], prompt[i], num_logprobs)


def test_prompt_logprobs_beside_other_requests(batching_llm, reference):
    prompts = [random_ids(length, length) for length in (20, 3, 70)]
    params = [SamplingParams(temperature=0, max_tokens=5, prompt_logprobs=n) for n in (1, None, 2)]
    outputs = batching_llm.generate(prompts, params)
    assert outputs[1].prompt_logprobs is None
    for output, wanted in ((outputs[0], 1), (outputs[2], 2)):
        expected = reference_logprobs(reference(), output.prompt_token_ids)
        for i, entry in enumerate(output.prompt_logprobs[1:], start=1):
            check_entry(entry, expected[i - 1], output.prompt_token_ids[i], wanted)


def test_sampled_tokens_follow_the_distribution(batching_llm, reference):
    """Pearson's chi-squared of 1,024 draws over the likeliest tokens; it exceeds the limit once in 10,000 seeds."""
    prompt, temperature = random_ids(3), 0.8
    params = [SamplingParams(n=128, seed=seed, temperature=temperature, max_tokens=1) for seed in range(8)]
    outputs = batching_llm.generate([prompt] * 8, params)
    drawn = [completion.token_ids[0] for output in outputs for completion in output.outputs]
    logits = torch.from_numpy(reference_logits(reference(), prompt)[-1])
    expected = torch.softmax(logits / temperature, dim=-1).numpy() * len(drawn)
    likely = np.argsort(-expected)[: int((expected > 10).sum())]
    assert len(likely) > 5
    observed = np.bincount(drawn, minlength=len(expected)).astype(float)
    observed = np.append(observed[likely], len(drawn) - observed[likely].sum())
    expected = np.append(expected[likely], len(drawn) - expected[likely].sum())
    statistic = np.sum((observed - expected) ** 2 / expected)
    degrees = len(likely)
    # Wilson and Hilferty's approximation of the chi-squared quantile at 3.72 standard deviations.
    assert statistic < degrees * (1 - 2 / (9 * degrees) + 3.72 * np.sqrt(2 / (9 * degrees))) ** 3


@pytest.mark.sampled(3)
@pytest.mark.parametrize("path", ["whole", "paged"])
@pytest.mark.parametrize("length", [1, 17, 500])
def test_compute_logits(llm, reference, path, length):
    token_ids = random_ids(length)
    logits = llm.compute_logits(token_ids, path=path)
    expected = reference_logits(reference(), token_ids)
    assert logits.shape == (length, 512)
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, expected, atol=TOLERANCE * np.abs(expected).max())


def test_compute_logits_refuses(llm):
    with pytest.raises(RequestError, match="path='fast' must be"):
        llm.compute_logits([1], path="fast")
    with pytest.raises(RequestError, match="empty"):
        llm.compute_logits([])
    with pytest.raises(RequestError, match="token 512; the model's token ids are 0 to 511"):
        llm.compute_logits([512])
    with pytest.raises(RequestError, match="1025 tokens"):
        llm.compute_logits([1] * 1025)
    stream = llm.stream([1, 2])
    with pytest.raises(EngineError, match="idle"):
        llm.compute_logits([1])
    stream.close()


def test_paged_logits_leave_the_prefix_cache_right(llm, reference):
    prompt = random_ids(60, seed=5)
    llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1))
    llm.compute_logits(random_ids(400, seed=6), path="paged")
    [output] = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=10))
    assert output.outputs[0].token_ids == reference_greedy(reference(), prompt, 10)
