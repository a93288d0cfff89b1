"""The sampler against transformers, torch and exact distributions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from transformers import RepetitionPenaltyLogitsProcessor

from jaxis.engine.execution.sampler import INVALID_TOKEN_ID, adjust_logits, sample, token_logprobs
from jaxis.engine.execution.sampling_batch import SamplerFeatures, SamplingArrays, build_sampling_batch
from jaxis.engine.execution.sampling_packer import SamplingPacker
from jaxis.engine.execution.sequence_sampling import SequenceSampling
from jaxis.sampling_params import SamplingParams


def request(params, vocab_size, *, prompt=(), output=(), seed=1, **kwargs):
    return SequenceSampling(
        params, prompt_token_ids=prompt, output_token_ids=list(output), vocab_size=vocab_size, seed=seed, **kwargs
    )


def random_logits(rows, vocab_size, seed=0):
    return np.random.default_rng(seed).normal(size=(rows, vocab_size)).astype(np.float32) * 3


@functools.partial(jax.jit, static_argnums=(1, 2))
def unpacked(vector, num_rows, features) -> SamplingArrays:
    return SamplingArrays.unpack(vector, num_rows, features)


def packed(requests, num_rows, vocab_size) -> tuple[SamplingArrays, SamplerFeatures]:
    """As a runner does it: one packed vector."""
    batch = build_sampling_batch(requests, num_rows, vocab_size)
    vector = SamplingPacker(vocab_size).pack([batch], num_rows, batch.features)
    return unpacked(vector, num_rows, batch.features), batch.features


def sample_requests(logits, requests, num_rows=None):
    """Samples with padding rows full of rubbish."""
    num_rows = num_rows or len(requests)
    arrays, features = packed(requests, num_rows, logits.shape[1])
    padded = np.full((num_rows, logits.shape[1]), np.nan, np.float32)
    padded[: len(requests)] = logits
    return sample(jax.device_put(padded), arrays, features=features)


def adjusted(logits, requests):
    arrays, features = packed(requests, len(requests), logits.shape[1])
    return np.asarray(jax.jit(adjust_logits, static_argnums=2)(logits, arrays, features))


def test_greedy_takes_the_first_most_likely_token():
    logits = np.round(random_logits(5, 3000))
    greedy = request(SamplingParams(temperature=0), 3000)
    np.testing.assert_array_equal(sample_requests(logits, [greedy] * 5).token_ids, logits.argmax(-1))


class Favoring:
    """A matcher that allows every token, and favors one."""

    param, error, is_complete, may_favor = "thinking_token_budget", None, False, True

    def __init__(self, token_id, vocab_size):
        self._token_id, self._mask = token_id, np.full(-(-vocab_size // 32), -1, np.int32)

    def follow(self, output_token_ids): ...

    def token_mask(self):
        return self._mask

    def favored_token(self):
        return self._token_id


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_favored_token_is_taken_where_it_is_a_twentieth_as_likely_as_the_most_likely_one(temperature):
    logits, favored = random_logits(300, 40), np.arange(300) % 41
    params = SamplingParams(temperature=temperature, thinking_token_budget=0, thinking_budget_grace_period=9)
    rows = [
        request(params, 40, seed=row, grammar=Favoring(None if token_id == 40 else int(token_id), 40))
        for row, token_id in enumerate(favored)
    ]
    plain = [request(SamplingParams(temperature=temperature), 40, seed=row) for row in range(300)]
    probabilities = np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True))
    likely = np.append(probabilities, np.zeros((300, 1)), axis=1)[np.arange(300), favored] >= 1 / 20
    expected = np.where(likely, favored, sample_requests(logits, plain).token_ids)
    assert 20 < likely.sum() < 280
    np.testing.assert_array_equal(sample_requests(logits, rows).token_ids, expected)


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-4, 1e300])
def test_top_k_of_one_is_greedy_at_any_temperature(temperature):
    logits = random_logits(5, 300)
    row = request(SamplingParams(temperature=temperature, top_k=1), 300)
    np.testing.assert_array_equal(sample_requests(logits, [row] * 5).token_ids, logits.argmax(-1))


def test_repetition_penalty_equals_transformers_over_prompt_and_output():
    logits = random_logits(2, 300)
    prompts, outputs = [[1, 2, 2, 299], list(range(100))], [[5, 5, 1], []]
    rows = [
        request(SamplingParams(repetition_penalty=1.7), 300, prompt=p, output=o)
        for p, o in zip(prompts, outputs, strict=True)
    ]
    for row, prompt, output, got in zip(logits, prompts, outputs, adjusted(logits, rows), strict=True):
        scores = torch.from_numpy(row[None])
        expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([prompt + output]), scores)
        np.testing.assert_allclose(got, expected[0], rtol=1e-6)


def test_frequency_and_presence_penalties_count_the_output_only():
    logits = random_logits(1, 300)
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=-0.25)
    expected = logits[0].copy()
    expected[5] -= 3 * 0.5 - 0.25
    expected[6] -= 0.5 - 0.25
    got = adjusted(logits, [request(params, 300, prompt=[5, 7, 8], output=[5, 6, 5, 5])])
    np.testing.assert_allclose(got[0], expected, rtol=1e-6)


def test_bias_bans_and_allowed_tokens_change_their_tokens_and_no_other():
    logits = random_logits(3, 300)
    rows = [
        request(SamplingParams(logit_bias={3: 2.5, 299: -100.0}), 300),
        request(SamplingParams(allowed_token_ids=[0, 4, 299], logit_bias={4: 1.0, 5: 50.0}), 300),
        request(SamplingParams(min_tokens=2, stop_token_ids=[9]), 300, output=[1], eos_token_ids=[8]),
    ]
    expected = logits.copy()
    expected[0, [3, 299]] += [2.5, -100.0]
    expected[1] = -np.inf
    expected[1, [0, 4, 299]] = logits[1, [0, 4, 299]] + np.float32([0, 1, 0])
    expected[2, [8, 9]] = -np.inf
    np.testing.assert_allclose(adjusted(logits, rows), expected, rtol=1e-6)


def test_penalties_come_after_bias_and_leave_banned_tokens_banned():
    logits = np.float32([[1.0, -1.0, 2.0, 0.5]])
    params = SamplingParams(
        logit_bias={0: -3.0}, allowed_token_ids=[0, 1, 3], repetition_penalty=2.0, presence_penalty=-2.0
    )
    got = adjusted(logits, [request(params, 4, output=[0, 2])])
    np.testing.assert_allclose(got, [[(1 - 3) * 2 + 2, -1.0, -np.inf, 0.5]])


def test_no_parameter_samples_a_token_it_rules_out():
    rng = np.random.default_rng(0)
    logits = np.repeat(random_logits(1, 50), 400, axis=0)
    allowed = [3, 7, 11, 13]
    params = SamplingParams(temperature=5.0, allowed_token_ids=allowed)
    seeds = map(int, rng.integers(2**63, size=400))
    rows = [request(params, 50, seed=seed, bad_words_token_ids=[[7]]) for seed in seeds]
    assert set(np.asarray(sample_requests(logits, rows).token_ids).tolist()) == {3, 11, 13}


DISTRIBUTIONS = {
    "temperature": SamplingParams(temperature=1.5),
    "top_k": SamplingParams(temperature=1.5, top_k=20),
    "top_p": SamplingParams(temperature=1.5, top_p=0.8),
    "min_p": SamplingParams(temperature=1.5, min_p=0.2),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "vary"), [*((name, "seed") for name in DISTRIBUTIONS), ("temperature", "step")])
def test_draws_follow_the_exact_distribution(name, vary):
    params = DISTRIBUTIONS[name]
    num_draws, vocab_size = 20000, 200
    logits = random_logits(1, vocab_size)[0] / 2
    arrays, features = packed([request(params, vocab_size)], 1, vocab_size)
    arrays = SamplingArrays(*(np.repeat(field, num_draws, axis=0) for field in arrays))
    count = np.arange(num_draws)
    if vary == "seed":
        arrays = arrays._replace(seed=np.stack([count, 0 * count], axis=1).astype(np.uint32))
    else:
        arrays = arrays._replace(step=count.astype(np.int32))
    drawn = sample(jnp.broadcast_to(logits, (num_draws, vocab_size)), arrays, features=features).token_ids
    drawn = np.bincount(drawn, minlength=vocab_size)

    probabilities = np.exp(logits.astype(np.float64) / params.temperature)
    order = np.argsort(-probabilities)
    ranked = probabilities[order] / probabilities.sum()
    if params.top_k:
        ranked[params.top_k :] = 0
    ranked[ranked < params.min_p * ranked[0]] = 0
    ranked[1:][np.cumsum(ranked)[:-1] >= params.top_p] = 0
    probabilities[order] = ranked / ranked.sum()

    assert drawn[probabilities == 0].sum() == 0
    expected = num_draws * probabilities
    common = expected >= 10
    observed = np.append(drawn[common], drawn[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    if expected[-1] == 0:
        observed, expected = observed[:-1], expected[:-1]
    assert len(expected) > 5
    assert chisquare(observed, expected).pvalue > 1e-3


def mixed_requests(vocab_size):
    """Every kind of row, some whose filters need the whole vocabulary to be searched."""
    history = {"prompt": list(range(0, vocab_size, 997)), "output": [1, 2, 3, 2]}
    kinds = [
        request(SamplingParams(temperature=0), vocab_size),
        request(SamplingParams(temperature=0.7, logprobs=3), vocab_size, seed=2**63 + 5),
        request(SamplingParams(temperature=1.0, top_k=40), vocab_size, seed=3),
        request(SamplingParams(temperature=4.0, top_p=0.9), vocab_size, seed=4),
        request(SamplingParams(temperature=1.2, top_p=0.6, top_k=1000, min_p=0.01), vocab_size, seed=5),
        request(SamplingParams(repetition_penalty=1.3, frequency_penalty=1.0), vocab_size, seed=6, **history),
        request(SamplingParams(allowed_token_ids=list(range(5, 45))), vocab_size, seed=7),
        request(SamplingParams(logit_bias={9: 20.0}, min_p=0.1), vocab_size, seed=8),
    ]
    return kinds


def test_a_row_samples_the_same_alone_and_among_32_mixed_rows():
    vocab_size = 20001
    kinds = mixed_requests(vocab_size)
    requests = [kinds[i % 8] for i in range(30)]
    logits = random_logits(30, vocab_size)
    together = sample_requests(logits, requests, num_rows=32)
    assert len(set(np.asarray(together.token_ids[:30]).tolist())) > 20
    for i in range(8):
        alone = sample_requests(logits[i : i + 1], requests[i : i + 1])
        assert together.token_ids[i] == alone.token_ids[0]
        if alone.logprobs is not None:
            for name in ("logprobs", "ranks", "top_logprobs", "top_ids"):
                np.testing.assert_array_equal(getattr(together.logprobs, name)[i], getattr(alone.logprobs, name)[0])
    shuffled = np.random.default_rng(1).permutation(30)
    again = sample_requests(logits[shuffled], [requests[i] for i in shuffled], num_rows=32)
    np.testing.assert_array_equal(again.token_ids[:30], np.asarray(together.token_ids)[shuffled])


def test_a_seed_and_a_step_each_change_the_draw():
    logits = np.zeros((1, 100000), np.float32)
    draws = [
        int(sample_requests(logits, [request(SamplingParams(), 100000, seed=seed, output=[0] * step)]).token_ids[0])
        for seed, step in [(1, 0), (1, 0), (2, 0), (1, 1), (1 + 2**32, 0)]
    ]
    assert draws[0] == draws[1]
    assert len(set(draws)) == 4


def test_logprobs_are_those_of_the_untouched_logits():
    logits = random_logits(2, 1000)
    params = SamplingParams(temperature=0.3, top_k=5, logit_bias={17: 100.0}, logprobs=4)
    out = sample_requests(logits, [request(params, 1000)] * 2)
    expected = torch.log_softmax(torch.from_numpy(logits).double(), -1)
    top, top_ids = expected.topk(4)
    np.testing.assert_array_equal(out.token_ids, [17, 17])
    np.testing.assert_allclose(out.logprobs.logprobs, expected[:, 17], rtol=1e-5)
    np.testing.assert_array_equal(out.logprobs.ranks, 1 + (logits > logits[:, 17:18]).sum(-1))
    np.testing.assert_allclose(out.logprobs.top_logprobs[:, :4], top, rtol=1e-5)
    np.testing.assert_array_equal(out.logprobs.top_ids[:, :4], top_ids)


def test_token_logprobs_of_a_prompt_in_bfloat16():
    logits = jnp.asarray(random_logits(7, 500)).astype(jnp.bfloat16)
    token_ids = np.array([0, 1, 499, 3, 3, 250, 9], np.int32)
    out = token_logprobs(logits, token_ids, num_logprobs=0)
    exact = np.array(logits.astype(jnp.float32))
    expected = torch.log_softmax(torch.from_numpy(exact).double(), -1)[np.arange(7), token_ids]
    np.testing.assert_allclose(out.logprobs, expected, rtol=1e-5)
    np.testing.assert_array_equal(out.ranks, 1 + (exact > exact[np.arange(7), token_ids][:, None]).sum(-1))
    assert out.top_ids.shape == (7, 0)


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(top_p=0.9)])
def test_logits_that_are_no_numbers_give_the_invalid_token_in_their_row_only(params):
    logits = random_logits(5, 300)
    logits[1, 100] = np.nan
    logits[2, 100] = np.inf
    logits[3] = -np.inf
    token_ids = np.asarray(sample_requests(logits, [request(params, 300)] * 5).token_ids)
    assert (token_ids[1:4] == INVALID_TOKEN_ID).all()
    assert (token_ids[[0, 4]] >= 0).all()
