"""A request's tokens do not depend on the rest of the batch, preemption, caching, chunking or the number of devices."""

import json

import numpy as np
import pytest

from jaxis import SamplingParams, StructuredOutputs
from tests.support.leak_check import no_blocks_leaked
from tests.support.simulated_devices import run_on_devices

PROMPTS = [np.random.default_rng(i).integers(0, 370, length).tolist() for i, length in enumerate([3, 9, 30, 47, 100])]
MIXED_PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=16),
    SamplingParams(temperature=0.0, max_tokens=9, logprobs=2),
    SamplingParams(temperature=0.9, seed=1, max_tokens=16),
    SamplingParams(temperature=1.5, seed=2, max_tokens=10, top_p=0.8),
    SamplingParams(temperature=1.5, seed=3, max_tokens=10, top_k=20),
    SamplingParams(temperature=1.5, seed=4, max_tokens=10, min_p=0.02, top_p=0.9, top_k=40),
    SamplingParams(temperature=0.0, max_tokens=10, repetition_penalty=1.5),
    SamplingParams(
        temperature=1.0, seed=5, max_tokens=10, frequency_penalty=0.5, presence_penalty=-0.3, repetition_penalty=0.8
    ),
    SamplingParams(temperature=0.0, max_tokens=10, logit_bias={7: 2.5, 9: -4.0}),
    SamplingParams(temperature=0.0, max_tokens=10, bad_words=["the", "cat reads", " garden"]),
    SamplingParams(temperature=1.0, seed=6, max_tokens=10, n=3),
    SamplingParams(temperature=0.0, max_tokens=12, structured_outputs=StructuredOutputs(regex="([a-e ]{2,5}[0-9]+)+")),
    SamplingParams(
        temperature=1.0, seed=7, n=2, max_tokens=12, top_p=0.9, structured_outputs=StructuredOutputs(json_object=True)
    ),
]
# Every kind with another prompt in each round, so that every kind runs beside every other.
MIXED = [
    (PROMPTS[(i + 2 * (i // len(MIXED_PARAMS))) % 4][-20:], MIXED_PARAMS[i % len(MIXED_PARAMS)]) for i in range(32)
]
SIMPLE_PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=24),
    SamplingParams(temperature=1.0, seed=8, max_tokens=24),
    SamplingParams(temperature=1.0, seed=9, max_tokens=24, structured_outputs=StructuredOutputs(regex="[ -~]{20,}")),
]
SIMPLE = [(PROMPTS[i % 5], SIMPLE_PARAMS[i % 3]) for i in range(10)]


def run(llm, requests):
    """Runs the requests together."""
    with no_blocks_leaked(llm):
        return llm.generate([prompt for prompt, _ in requests], [params for _, params in requests])


def run_alone(llm, requests):
    """Runs the requests one after the other, without anything in the prefix cache."""
    outputs = []
    for request in requests:
        llm.engine.reset()
        outputs += run(llm, [request])
    return outputs


def tokens(outputs):
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def simple_alone(shared_llm):
    """The tokens of each of SIMPLE, run alone."""
    return tokens(run_alone(shared_llm, SIMPLE))


def test_alone_or_among_32_mixed_requests(llm, start_llm):
    alone = run_alone(llm, MIXED)
    with start_llm(max_num_seqs=32) as batching:
        runner = batching.engine.runner
        forward, batch_sizes = runner.forward, []
        runner.forward = lambda output: (batch_sizes.append(len(output.scheduled)), forward(output))[1]
        together = run(batching, MIXED)
    assert max(batch_sizes) == 32
    assert tokens(together) == tokens(alone)
    for one, other in zip(alone, together, strict=True):
        for left, right in zip(one.outputs, other.outputs, strict=True):
            assert left.finish_reason == right.finish_reason
            if left.logprobs is not None:
                np.testing.assert_allclose(left.cumulative_logprob, right.cumulative_logprob, atol=1e-3)
    assert len({str(t) for t in tokens(alone)}) > 28, "the requests are to differ, or the test shows nothing"


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
def test_alone_or_in_a_batch_in_every_family(checkpoint, start_llm, family):
    window = {"hf_overrides": {"sliding_window": 20}} if family == "mistral" else {}
    with start_llm(checkpoint(family), max_num_seqs=8, max_num_batched_tokens=16, **window) as llm:
        assert tokens(run(llm, SIMPLE)) == tokens(run_alone(llm, SIMPLE))


def test_after_preemption(start_llm, simple_alone):
    # 14 blocks: the ten requests need up to 8 each.
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "max_model_len": 128, "kv_cache_memory": 14 * 8192}
    with start_llm(**sizes, enable_prefix_caching=False) as llm:
        assert tokens(run(llm, SIMPLE)) == simple_alone
        assert llm.engine.num_preemptions > 0


def test_on_a_prefix_cache_hit(llm, simple_alone):
    run(llm, SIMPLE)
    hits = run(llm, SIMPLE)
    assert [hit.num_cached_tokens for hit in hits] == [0, 0, 16, 32, 96] * 2
    assert tokens(hits) == simple_alone


def test_without_prefix_caching(start_llm, simple_alone):
    with start_llm(enable_prefix_caching=False) as llm:
        run(llm, SIMPLE)
        again = run(llm, SIMPLE)
    assert [output.num_cached_tokens for output in again] == [0] * len(SIMPLE)
    assert tokens(again) == simple_alone


@pytest.mark.parametrize("chunk", [16, 512])
def test_for_any_chunk_size(start_llm, simple_alone, chunk):
    """`simple_alone` has chunks of 64."""
    with start_llm(max_num_batched_tokens=chunk, max_num_seqs=8) as llm:
        assert tokens(run(llm, SIMPLE)) == simple_alone


@pytest.mark.multi_device
def test_on_2_and_8_devices(checkpoint, simple_alone):
    """With 2 kv heads: split over 2 devices, replicated over 8."""
    script = (
        "import json, sys; from tests.engine.test_same_answer import SIMPLE, run, tokens; from jaxis import LLM\n"
        "for size in (2, 8):\n"
        "    llm = LLM(sys.argv[1], tensor_parallel_size=size, max_num_batched_tokens=16, max_num_seqs=8,\n"
        "              kv_cache_memory='8MiB', show_progress=False)\n"
        "    print(json.dumps(tokens(run(llm, SIMPLE))))\n"
    )
    output = run_on_devices("-c", script, str(checkpoint()), num_devices=8)
    on_2, on_8 = map(json.loads, output.splitlines())
    assert on_2 == simple_alone
    assert on_8 == simple_alone
