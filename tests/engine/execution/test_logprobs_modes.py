"""Each mode of log-probabilities against its definition in float64, whatever modes are beside it in the step."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxis.engine.execution.sampler import sample, score
from jaxis.engine.execution.sampling_batch import SamplingArrays, build_sampling_batch, scoring_batch
from jaxis.engine.execution.sampling_packer import SamplingPacker
from jaxis.engine.execution.sequence_sampling import SequenceSampling
from jaxis.sampling_params import LOGPROBS_MODES, SamplingParams

VOCAB_SIZE = 1000
PROMPT, OUTPUT = [3, 7, 7, 9], [7, 11, 500, 11]
REQUESTS = {
    "plain": {"temperature": 1.0},
    "tempered": {"temperature": 0.7},
    "top k": {"temperature": 1.3, "top_k": 20},
    "top p": {"temperature": 0.9, "top_p": 0.8},
    "min p": {"temperature": 2.0, "min_p": 0.02},
    "all filters": {"temperature": 1.5, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
    "biased": {"temperature": 0.8, "top_k": 7, "logit_bias": {5: 4.0, 6: -100.0}},
    "few allowed": {"temperature": 1.0, "allowed_token_ids": [1, 2, 3, 900]},
    "penalized": {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": -0.2, "top_p": 0.95},
    "greedy": {"temperature": 0.0, "logit_bias": {8: 1.0}},
}


def logits_of(rows, seed=0):
    return np.random.default_rng(seed).normal(size=(rows, VOCAB_SIZE)).astype(np.float32) * 3


def log_softmax(x):
    shifted = x - x.max()
    return shifted - np.log(np.exp(shifted).sum())


def processed(logits, params):
    """What is sampled from, as logits, and what of the probability is kept; in float64, by the documentation."""
    x = logits.astype(np.float64)
    if params.allowed_token_ids:
        x = np.where(np.isin(np.arange(len(x)), params.allowed_token_ids), x, -np.inf)
    for token_id, bias in (params.logit_bias or {}).items():
        x[token_id] += bias
    if params.has_penalties:
        for token_id in {*PROMPT, *OUTPUT}:
            x[token_id] *= params.repetition_penalty ** (-1 if x[token_id] > 0 else 1)
            count = OUTPUT.count(token_id)
            x[token_id] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    if params.greedy:
        return x, 1.0
    x = x / params.temperature
    probabilities = np.exp(log_softmax(x))
    kept = probabilities >= params.min_p * probabilities.max()
    if params.top_k > 0:
        kept &= probabilities >= np.sort(probabilities[kept])[::-1][: params.top_k].min()
    if params.top_p < 1:
        of_kept = np.sort(probabilities[kept])[::-1] / probabilities[kept].sum()
        kept &= probabilities >= of_kept[np.searchsorted(of_kept.cumsum(), params.top_p)] * probabilities[kept].sum()
    return np.where(kept, x, -np.inf), probabilities[kept].sum()


def values_of(logits, params):
    """The definition of each mode: float64 [V]; and the mass."""
    after, mass = processed(logits, params)
    if params.logprobs_mode == "raw_logits":
        return logits.astype(np.float64), mass
    if params.logprobs_mode == "processed_logits":
        return after, mass
    return log_softmax(logits.astype(np.float64) if params.logprobs_mode == "raw_logprobs" else after), mass


@pytest.mark.sampled
@pytest.mark.parametrize("names", [list(REQUESTS), ["greedy"]], ids=["mixed", "greedy alone"])
def test_each_mode_is_its_definition(names):
    rows = [SamplingParams(logprobs=5, seed=1, logprobs_mode=m, **REQUESTS[n]) for n in names for m in LOGPROBS_MODES]
    logits = logits_of(len(rows))
    sequences = [
        SequenceSampling(params, prompt_token_ids=PROMPT, output_token_ids=OUTPUT, vocab_size=VOCAB_SIZE, seed=row)
        for row, params in enumerate(rows)
    ]
    batch = build_sampling_batch(sequences, len(rows), VOCAB_SIZE)
    vector = SamplingPacker(VOCAB_SIZE).pack([batch], len(rows), batch.features)
    arrays = SamplingArrays.unpack(jnp.asarray(vector), len(rows), batch.features)
    token_ids, logprobs = sample(jnp.asarray(logits), arrays, features=batch.features)
    for row, params in enumerate(rows):
        expected, mass = values_of(logits[row], params)
        token_id = int(token_ids[row])
        np.testing.assert_allclose(logprobs.logprobs[row], expected[token_id], rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(logprobs.kept_mass[row], mass, rtol=2e-5)
        assert logprobs.ranks[row] == 1 + (expected > expected[token_id]).sum()
        order = np.argsort(-expected, kind="stable")[:5]
        finite = np.isfinite(expected[order])
        np.testing.assert_array_equal(logprobs.top_ids[row, :5][finite], order[finite])
        np.testing.assert_allclose(logprobs.top_logprobs[row, :5], expected[order], rtol=2e-5, atol=2e-5)


def test_what_is_scored_is_what_is_sampled():
    logits = logits_of(16, seed=1)
    for name in ("all filters", "greedy"):
        for mode in LOGPROBS_MODES[1:]:
            params = SamplingParams(logprobs=2, prompt_logprobs=2, seed=1, logprobs_mode=mode, **REQUESTS[name])
            sequences = [
                SequenceSampling(params, prompt_token_ids=PROMPT, output_token_ids=[], vocab_size=VOCAB_SIZE, seed=row)
                for row in range(16)
            ]
            # Beside a row with every parameter, which makes the step's program another one.
            other = SamplingParams(logprobs=1, logprobs_mode="raw_logits", **REQUESTS["penalized"])
            sequences.append(
                SequenceSampling(other, prompt_token_ids=PROMPT, output_token_ids=OUTPUT, vocab_size=VOCAB_SIZE, seed=0)
            )
            batch = build_sampling_batch(sequences, 17, VOCAB_SIZE)
            vector = SamplingPacker(VOCAB_SIZE).pack([batch], 17, batch.features)
            arrays = SamplingArrays.unpack(jnp.asarray(vector), 17, batch.features)
            padded = jnp.asarray(np.concatenate([logits, logits[:1]]))
            token_ids, sampled = sample(padded, arrays, features=batch.features)
            alone = scoring_batch(params, 16, VOCAB_SIZE)
            vector = SamplingPacker(VOCAB_SIZE).pack([alone], 16, alone.features)
            arrays = SamplingArrays.unpack(jnp.asarray(vector), 16, alone.features)
            scored = score(jnp.asarray(logits), token_ids[:16], arrays, features=alone.features)
            for ours, theirs in zip(scored, sampled, strict=True):
                np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs)[:16])
