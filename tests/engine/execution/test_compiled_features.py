"""Few sampler programs serve all combinations of features, with the same tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxis.engine.execution.compiled_features import MAX_EXACT, CompiledFeatures
from jaxis.engine.execution.sampler import sample
from jaxis.engine.execution.sampling_batch import SamplerFeatures, SamplingArrays, build_sampling_batch
from jaxis.engine.execution.sampling_packer import SamplingPacker
from jaxis.engine.execution.sequence_sampling import SequenceSampling
from jaxis.sampling_params import SamplingParams

VOCAB_SIZE = 3000
WIDTHS = st.sampled_from([0, 64, 256, 1024])
FEATURES = st.builds(
    SamplerFeatures,
    greedy_only=st.booleans(),
    has_filters=st.booleans(),
    history_width=WIDTHS,
    bias_width=WIDTHS,
    allowed_width=WIDTHS,
    mask_width=st.sampled_from([0, 94]),
    num_logprobs=st.sampled_from([None, 20]),
)


@settings(max_examples=50, deadline=None)
@given(st.lists(FEATURES, min_size=40, max_size=200))
def test_few_are_chosen_and_each_does_what_is_needed(wanted):
    compiled, chosen = CompiledFeatures(), set()
    for features in wanted:
        choice = compiled.choose(4, features)
        assert choice.covers(features)
        assert compiled.choose(4, choice) == choice
        chosen.add(choice)
    # Past the exact ones, each new one is more than all before: four widths three times wider, three yes or no.
    assert len(chosen) <= MAX_EXACT + 3 * 3 + 4
    assert compiled.choose(8, wanted[0]) == wanted[0]


def test_a_program_for_more_draws_the_same_tokens():
    base = {"prompt_token_ids": [5, 6, 7], "output_token_ids": [9, 9], "vocab_size": VOCAB_SIZE, "seed": 3}
    requests = [
        SequenceSampling(SamplingParams(**params), **base)
        for params in (
            {"temperature": 0.0},
            {"temperature": 0.9},
            {"temperature": 0.8, "top_p": 0.9, "top_k": 50},
            {"temperature": 0.7, "frequency_penalty": 0.5, "logit_bias": {11: 4.0}},
            {"temperature": 1.0, "allowed_token_ids": list(range(40, 90))},
            {"temperature": 0.0, "logprobs": 3},
        )
    ]
    logits = np.random.default_rng(0).normal(size=(len(requests), VOCAB_SIZE)).astype(np.float32) * 3
    batches = [build_sampling_batch([request], 1, VOCAB_SIZE) for request in requests]
    exact = [batch.features for batch in batches]
    most = functools.reduce(SamplerFeatures.join, exact, SamplerFeatures(mask_width=-(-VOCAB_SIZE // 32)))
    draw = jax.jit(sample, static_argnames="features")
    for row, (batch, features) in enumerate(zip(batches, exact, strict=True)):
        results = []
        for used in (features, most):
            vector = SamplingPacker(VOCAB_SIZE).pack([batch], 1, used)
            arrays = SamplingArrays.unpack(jnp.asarray(vector), 1, used)
            results.append(draw(jnp.asarray(logits[row : row + 1]), arrays, features=used))
        np.testing.assert_array_equal(results[0].token_ids, results[1].token_ids)
        if features.num_logprobs is not None:
            jax.tree.map(np.testing.assert_array_equal, results[0].logprobs, results[1].logprobs)
