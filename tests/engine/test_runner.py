"""The compiled step programs."""

import contextlib

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxis.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.engine.execution.runner import ForwardKey, Runner
from jaxis.kernels import native
from jaxis.models.qwen3 import Qwen3ForCausalLM
from jaxis.parallel.mesh import make_mesh

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
    return Runner(config, model, make_mesh(), on_compile=lambda key: contextlib.nullcontext())


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


@pytest.mark.parametrize("num_tokens", [1, 8, 64])
def test_a_step_updates_the_kv_caches_in_place(any_runner, num_tokens):
    runner = any_runner
    with jax.set_mesh(runner.mesh):
        program = runner._lower_forward(ForwardKey(runner.step_shape(num_tokens))).compile()
    memory = program.memory_analysis()
    cache_bytes = sum(cache.nbytes for cache in runner._caches)

    assert memory.alias_size_in_bytes >= cache_bytes
    assert memory.temp_size_in_bytes < runner._caches[0].nbytes / 4


def test_programs_are_traced_while_the_caches_are_made_anew(any_runner, monkeypatch):
    """As after a step that failed, when another thread may be preparing programs."""
    monkeypatch.setattr(any_runner, "_caches", [])
    with jax.set_mesh(any_runner.mesh):
        any_runner._lower_forward(ForwardKey(any_runner.step_shape(4)))


@pytest.mark.parametrize(
    ("compiles_fast", "num_tokens", "padded"),
    [(False, n, padded) for n, padded in [(1, 1), (2, 8), (8, 8), (9, 16), (700, 1024), (1000, 1024), (1024, 1024)]]
    + [(True, n, padded) for n, padded in [(1, 1), (2, 2), (3, 4), (6, 8), (9, 12), (13, 16), (17, 24), (700, 768)]],
)
def test_steps_are_padded_to_few_shapes(runner, monkeypatch, compiles_fast, num_tokens, padded):
    monkeypatch.setattr(runner, "_compiles_fast", compiles_fast)
    shape = runner.step_shape(num_tokens)

    assert (shape.num_tokens, shape.num_requests) == (padded, min(padded, 1024))
    assert shape.max_blocks == 16


def test_the_sampler_is_given_the_heads_arrays_only(runner):
    """The model is untied: its head is an array of its own."""
    [head] = runner._head_params
    assert head.shape == (CONFIG["vocab_size"], CONFIG["hidden_size"])
    assert len(runner._params) > 20
