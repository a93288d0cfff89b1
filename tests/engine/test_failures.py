"""Damaged weights, failing steps and Ctrl-C: which requests fail, and that all others get the right answer."""

import contextlib
import os
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxis import SamplingParams
from jaxis.errors import EngineError
from tests.support.leak_check import no_blocks_leaked
from tests.support.tiny_checkpoints import variant

GREEDY = SamplingParams(temperature=0, max_tokens=20)
PROMPTS = [[i + 1, i + 2, i + 3] * 7 for i in range(6)]
DAMAGED_ID = 17


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def damaged_llm(checkpoint, tmp_path_factory, start_llm):
    """A model whose embedding of DAMAGED_ID holds a NaN; it may run up to 8 requests at a time."""
    folder = variant(tmp_path_factory.mktemp("damaged") / "nan", checkpoint(), files={"model.safetensors": None})
    tensors = load_file(checkpoint() / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"].copy()
    embedding[DAMAGED_ID, 3] = np.nan
    save_file(tensors | {"model.embed_tokens.weight": embedding}, folder / "model.safetensors")
    with start_llm(folder, max_num_seqs=8, max_model_len=64, kv_cache_memory=20 * 8192) as llm:
        yield llm


def test_nan_fails_its_own_request_only(damaged_llm, llm):
    never = {DAMAGED_ID: -100.0}
    params = SamplingParams(temperature=0, max_tokens=20, logit_bias=never)
    prompts = [[1, 2, 3], [4, 5, 6]]
    expected = tokens(llm.generate(prompts, params))
    with no_blocks_leaked(damaged_llm):
        streams = [damaged_llm.stream(prompt, params) for prompt in prompts]
        first = [next(stream).token_ids for stream in streams]
        with pytest.raises(EngineError, match="prompt 1 of 2: the model's logits are not finite"):
            damaged_llm.generate([[9, 9], [7, DAMAGED_ID, 8]], params)
        rest = [[token_id for piece in stream for token_id in piece.token_ids] for stream in streams]
    assert [a + b for a, b in zip(first, rest, strict=True)] == expected


def test_nan_fails_a_stream_and_a_request_of_several_completions(damaged_llm):
    with no_blocks_leaked(damaged_llm):
        with pytest.raises(EngineError, match="not finite"):
            list(damaged_llm.stream([DAMAGED_ID], GREEDY))
        with pytest.raises(EngineError, match="the prompt: the model's logits are not finite"):
            damaged_llm.generate([DAMAGED_ID] * 40, SamplingParams(n=3, max_tokens=1))


def test_nan_does_not_come_back_from_the_cache(damaged_llm, llm):
    """Neither as a cached prefix nor as what is left in a reused block."""
    engine = damaged_llm.engine
    engine.reset()
    for i in range(6):
        with pytest.raises(EngineError):
            damaged_llm.generate([i] + [DAMAGED_ID] * 50, GREEDY)
    assert not engine.scheduler.block_manager.pools[0]._block_of_digest
    state = engine.runner.executor.state
    state.caches = jax.tree.map(lambda array: jnp.full_like(array, np.nan), state.caches)
    params = SamplingParams(temperature=0, max_tokens=20, logit_bias={DAMAGED_ID: -100.0})
    prompts = [[20, *range(40, 40 + 5 * i)] for i in range(6)]
    with no_blocks_leaked(damaged_llm):
        assert tokens(damaged_llm.generate(prompts, params)) == tokens(llm.generate(prompts, params))


@contextlib.contextmanager
def failing_dispatch(llm, when, error):
    """`Runner.dispatch` raises `error` in its call number `when`."""
    runner = llm.engine.runner
    dispatch, calls = runner.dispatch, iter(range(1000))

    def failing(output, sampling):
        if next(calls) == when:
            raise error
        return dispatch(output, sampling)

    runner.dispatch = failing
    try:
        yield
    finally:
        runner.dispatch = dispatch


@pytest.mark.parametrize("when", [0, 3])
def test_failing_step(batching_llm, when):
    expected = tokens(batching_llm.generate(PROMPTS, GREEDY))
    stream = batching_llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    with failing_dispatch(batching_llm, when, RuntimeError("out of memory\nallocator: ...")):
        with pytest.raises(EngineError, match=r"a step failed and 7 requests were lost: out of memory$"):
            batching_llm.generate(PROMPTS, GREEDY)
        assert tokens(batching_llm.generate(PROMPTS, GREEDY)) == expected
        with pytest.raises(EngineError, match="a step failed"):
            list(stream)


def test_prefix_cache_counts_survive_a_failed_step(batching_llm):
    engine = batching_llm.engine
    prompt = list(range(300, 340))
    batching_llm.generate([prompt], GREEDY)
    batching_llm.generate([prompt], GREEDY)
    blocks = engine.scheduler.block_manager
    queries, hits = blocks.prefix_cache_queries, blocks.prefix_cache_hits
    assert queries >= 80
    assert hits >= 32
    with failing_dispatch(batching_llm, 1, RuntimeError("out of memory")), pytest.raises(EngineError):
        batching_llm.generate([prompt], GREEDY)
    blocks = engine.scheduler.block_manager
    assert (blocks.prefix_cache_queries, blocks.prefix_cache_hits) == (queries + 40, hits + 32)


def test_step_that_took_the_caches_with_it(batching_llm):
    """The prefix cache must not name blocks whose contents are lost."""
    expected = tokens(batching_llm.generate(PROMPTS, GREEDY))
    for cache in jax.tree.leaves(batching_llm.engine.runner.executor.state.caches):
        cache.delete()
    with pytest.raises(EngineError, match="a step failed"):
        batching_llm.generate(PROMPTS, GREEDY)
    outputs = batching_llm.generate(PROMPTS, GREEDY)
    assert {output.num_cached_tokens for output in outputs} == {0}
    assert tokens(outputs) == expected


def test_failing_logits(llm, monkeypatch):
    expected = llm.compute_logits([1, 2, 3], path="paged")
    runner = llm.engine.runner
    paged_logits = runner.paged_logits

    def failing(output):
        paged_logits(output)
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(runner, "paged_logits", failing)
        with pytest.raises(ZeroDivisionError):
            llm.compute_logits([1, 2, 3], path="paged")
    np.testing.assert_array_equal(llm.compute_logits([1, 2, 3], path="paged"), expected)


@pytest.fixture
def interrupting(ctrl_c):
    """`with interrupting(seconds):` sends this process a Ctrl-C; asserts that it arrives."""
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    @contextlib.contextmanager
    def interrupt(seconds):
        timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            yield
        timer.join()

    yield interrupt
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


ENDLESS = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)


@pytest.mark.parametrize("seconds", [0.01, 0.05, 0.11])
def test_ctrl_c(batching_llm, interrupting, seconds):
    expected = tokens(batching_llm.generate(PROMPTS, GREEDY))
    with no_blocks_leaked(batching_llm), interrupting(seconds):
        batching_llm.generate(PROMPTS, ENDLESS)
    assert tokens(batching_llm.generate(PROMPTS, GREEDY)) == expected


def test_ctrl_c_leaves_other_requests_alone(batching_llm, interrupting):
    expected = tokens(batching_llm.generate(PROMPTS[:1], GREEDY))[0]
    stream = batching_llm.stream(PROMPTS[0], GREEDY)
    first = next(stream).token_ids
    with interrupting(0.03):
        batching_llm.generate(PROMPTS, ENDLESS)
    assert first + [token_id for piece in stream for token_id in piece.token_ids] == expected


def test_ctrl_c_ends_a_stream(batching_llm, interrupting):
    with no_blocks_leaked(batching_llm), interrupting(0.05):
        list(batching_llm.stream(PROMPTS[0], ENDLESS))


def test_second_ctrl_c_breaks_off_a_step(batching_llm):
    """The engine starts over, whatever the step had done."""
    expected = tokens(batching_llm.generate(PROMPTS, GREEDY))
    with failing_dispatch(batching_llm, 2, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        batching_llm.generate(PROMPTS, GREEDY)
    assert tokens(batching_llm.generate(PROMPTS, GREEDY)) == expected
