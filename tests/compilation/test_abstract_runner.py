"""Programs lowered from shapes alone are those that a Runner with arrays compiles."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import pytest

from jaxis.compilation.abstract_runner import AbstractRunner
from jaxis.compilation.step_costs import bytes_per_device
from jaxis.config import CacheConfig, LoadConfig, ModelConfig, SchedulerConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.engine.execution.executor import DeviceExecutor
from jaxis.engine.execution.kv_cache import plan_kv_caches
from jaxis.engine.execution.program_key import lower
from jaxis.engine.execution.programs import Programs
from jaxis.engine.execution.runner import Runner
from jaxis.engine.execution.sampling_batch import SamplerFeatures
from jaxis.engine.execution.step_programs import ForwardKey, SampleKey
from jaxis.models.model_loader import load_model
from jaxis.parallel.mesh import make_mesh
from jaxis.quantization.arguments import parse_quantization
from tests.support.cut_models import cut_config

# A published model and what makes it tiny: heads, latents and experts, with and without rules of quantization.
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": None,
}
LATENT = {
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
}
MODELS = {
    "qwen3-0.6b": {},
    "qwen3-30b-a3b": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "deepseek-v2-lite": LATENT,
}


@pytest.fixture(params=[(name, kind) for name in MODELS for kind in (None, "int8", "int4")], ids=str)
def config(request):
    name, quantization = request.param
    values = cut_config(name) | SIZES | MODELS[name]
    if name == "deepseek-v2-lite":
        del values["head_dim"]
    return VllmConfig(
        ModelConfig(name, HFConfig(values, source=name), jnp.float32, max_model_len=64),
        CacheConfig(kv_cache_memory_bytes=1 << 20),
        SchedulerConfig(4, 16),
        load_config=LoadConfig(load_format="dummy"),
        quant_config=parse_quantization(quantization),
    )


@pytest.mark.sampled
def test_programs_and_sizes_are_those_of_a_runner(config):
    mesh = make_mesh()
    model = load_model(config, mesh)
    plan = plan_kv_caches(model, config, mesh)
    runner = Runner(config, Programs(DeviceExecutor(config, model, mesh, plan), lambda _: contextlib.nullcontext()))
    abstract = AbstractRunner(config, mesh)
    assert bytes_per_device(abstract.weights) == runner.weight_bytes
    assert bytes_per_device(abstract.caches) == sum(
        cache.nbytes for cache in jax.tree.leaves(runner.executor.state.caches)
    )
    assert all(isinstance(array, jax.ShapeDtypeStruct) for array in abstract.weights + abstract.caches)

    shape = runner.step_shape(8)
    assert abstract.forward(8).as_text() == lower(ForwardKey(shape), runner.executor.context).as_text()
    sampler = lower(SampleKey(shape.num_seqs, SamplerFeatures()), runner.executor.context)
    assert abstract.sampler(8).as_text() == sampler.as_text()
    runner.close()
