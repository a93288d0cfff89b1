"""The compiled step programs."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxis.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.engine.execution.executor import DeviceExecutor
from jaxis.engine.execution.kv_cache import plan_kv_caches
from jaxis.engine.execution.model_arrays import indices_read
from jaxis.engine.execution.programs import Programs
from jaxis.engine.execution.runner import Runner
from jaxis.engine.execution.step_programs import ForwardKey, GreedyStepKey
from jaxis.engine.execution.step_shapes import StepShapes
from jaxis.kernels import native
from jaxis.models.qwen3 import Qwen3ForCausalLM
from jaxis.parallel.mesh import make_mesh
from jaxis.sampling_params import SamplingParams

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
}


@pytest.fixture(scope="module")
def runner():
    return make_runner()


def make_runner(**cache):
    config = VllmConfig(
        ModelConfig("", HFConfig(CONFIG), max_model_len=256),
        cache_config=CacheConfig(kv_cache_memory_bytes=64 << 20, **cache),
        scheduler_config=SchedulerConfig(max_num_seqs=1024, max_num_batched_tokens=1024),
    )
    model = Qwen3ForCausalLM(config, nnx.Rngs(0))
    mesh = make_mesh()
    plan = plan_kv_caches(model, config, mesh)
    return Runner(config, Programs(DeviceExecutor(config, model, mesh, plan), lambda _: contextlib.nullcontext()))


@pytest.fixture(
    scope="module",
    # With the native kernel, where it is there, and without it: it does not take blocks of 8.
    params=[{}, {"cache_dtype": jnp.bfloat16}, {"cache_dtype": jnp.int8}, {"block_size": 8}],
    ids=str,
)
def any_runner(request):
    if request.param.get("cache_dtype") == jnp.bfloat16 and native.library() is None:
        pytest.skip("XLA's CPU backend works on bfloat16 caches in float32 copies")
    return make_runner(**request.param)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("num_tokens", [1, 8, 64])
def test_a_step_updates_the_kv_caches_in_place(any_runner, num_tokens):
    runner = any_runner
    program = runner.executor.compile(ForwardKey(runner.step_shape(num_tokens)))
    memory = program.memory_analysis()
    caches = jax.tree.leaves(runner.executor.state.caches)
    cache_bytes = sum(cache.nbytes for cache in caches)

    assert memory.alias_size_in_bytes >= cache_bytes
    assert memory.temp_size_in_bytes < caches[0].nbytes / 4


def test_a_greedy_step_updates_the_kv_caches_in_place(any_runner):
    executor = any_runner.executor
    program = executor.compile(GreedyStepKey(any_runner.step_shape(1)))
    assert program.memory_analysis().alias_size_in_bytes >= sum(
        cache.nbytes for cache in jax.tree.leaves(executor.state.caches)
    )


@pytest.mark.sampled(3)
def test_programs_are_traced_while_the_caches_are_made_anew(any_runner, monkeypatch):
    """As after a step that failed, when another thread may be preparing programs."""
    monkeypatch.setattr(any_runner.executor.state, "caches", [])
    any_runner.executor.compile(ForwardKey(any_runner.step_shape(4)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("compiles_fast", "num_tokens", "padded"),
    [(False, n, padded) for n, padded in [(1, 1), (2, 8), (8, 8), (9, 16), (700, 1024), (1000, 1024), (1024, 1024)]]
    + [(True, n, padded) for n, padded in [(1, 1), (2, 2), (3, 4), (6, 8), (9, 12), (13, 16), (17, 24), (700, 768)]],
)
def test_steps_are_padded_to_few_shapes(runner, compiles_fast, num_tokens, padded):
    shapes = StepShapes(runner.vllm_config, runner.num_blocks, runner.max_model_len, compiles_fast=compiles_fast)
    shape = shapes.of(num_tokens)

    assert (shape.num_tokens, shape.num_seqs) == (padded, min(padded, 1024))
    assert shape.max_blocks == 16


def test_the_sampler_is_given_the_heads_arrays_only(runner):
    """The model is untied: its head is an array of its own."""
    [head] = runner.executor.context.model.head_arrays
    assert head.shape == (CONFIG["vocab_size"], CONFIG["hidden_size"])
    assert len(runner.executor.context.model.arrays) > 20


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["plain", "jit", "checkpoint"])
def test_which_arrays_a_function_reads(wrap):
    def function(arrays, x):
        return {"product": wrap(jnp.multiply)(arrays[2], x), "same": arrays[0]}

    arrays = [jnp.full((2,), i, jnp.float32) for i in range(4)]
    assert indices_read(function, arrays, jax.ShapeDtypeStruct((2,), jnp.float32)) == [0, 2]


def test_a_step_is_sampled_before_the_next_one_is_forwarded(start_llm):
    """The next step takes its input tokens from where the sampler leaves them."""
    with start_llm() as llm:
        engine = llm.engine
        engine.add_request("r", [1, 2, 3], SamplingParams(max_tokens=8))
        output = engine.scheduler.schedule()
        engine.runner.forward(output)
        with pytest.raises(RuntimeError, match="sampled first"):
            engine.runner.forward(output)
        engine.reset()
        assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8))[0].finished


@pytest.mark.skipif(native.library() is None, reason="without native kernels, every step is two programs")
def test_a_greedy_decode_is_one_program_and_samples_what_two_do(start_llm, monkeypatch):
    """Log-probabilities make a step two programs, which see the same logits."""
    prompt, params = [1, 2, 3], {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    with start_llm() as llm:
        forward, shapes = llm.engine.runner._forward, []
        monkeypatch.setattr(
            llm.engine.runner,
            "_forward",
            lambda *args, **options: shapes.append(args[1].num_tokens) or forward(*args, **options),
        )
        [one] = llm.generate([prompt], SamplingParams(**params))
        assert 1 not in shapes
        [two] = llm.generate([prompt], SamplingParams(**params, logprobs=1))
        assert shapes.count(1) >= 10
    assert one.outputs[0].token_ids == two.outputs[0].token_ids


@pytest.mark.sampled(4)
@pytest.mark.parametrize("changes", [{"temperature": 1.0, "seed": 3}, {"logit_bias": {7: 100.0}}, {"logprobs": 2}])
def test_greedy_and_other_sequences_follow_each_other(start_llm, changes):
    """A sequence samples alone what it does beside a greedy one that ends early, or that goes on after it."""
    greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    other = SamplingParams(**({"temperature": 0.0, "max_tokens": 10, "ignore_eos": True} | changes))
    with start_llm(max_num_seqs=2) as llm:
        [alone] = llm.generate([[5, 6, 7]], other)
        _, beside = llm.generate([[1, 2], [5, 6, 7]], [greedy, other])
        beside_longer, longer = llm.generate([[5, 6, 7], [1, 2]], [other, dataclasses.replace(greedy, max_tokens=20)])
    assert alone.outputs[0].token_ids == beside.outputs[0].token_ids == beside_longer.outputs[0].token_ids
    assert len(longer.outputs[0].token_ids) == 20
