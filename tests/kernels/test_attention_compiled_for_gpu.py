"""Paged and latent attention, compiled for a GPU that is not there: registers suffice, and no cache is copied."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxis.compilation.abstract_runner import AbstractRunner, target_mesh
from jaxis.compilation.compiled_program import CompiledProgram, read_program
from jaxis.compilation.step_costs import bytes_per_device
from jaxis.compilation.targets import parse_target
from jaxis.config.attention_span import AttentionSpan
from jaxis.kernels.batch import Batch
from jaxis.kernels.index_selection import index_cache_layout, select_tokens
from jaxis.kernels.latent_attention import gpu as latent_gpu
from jaxis.kernels.latent_attention import latent_attention
from jaxis.kernels.latent_attention import layout as latent_layout
from jaxis.kernels.paged_cache import CacheLayout, PagedCache
from jaxis.kernels.ragged_paged_attention import gpu, layout, ragged_paged_attention
from tests.kernels.ptxas import AssembledKernel, compiled_kernels
from tests.support.cut_models import NUM_LAYERS, cut_model

pytestmark = pytest.mark.compile_gpu

NUM_BLOCKS, BLOCK_SIZE, MAX_BLOCKS, NUM_REQUESTS = 1024, 16, 512, 64
KERNELS = ["paged_prefill", "paged_decode", "paged_decode_combine"]
BF16, F16, F32, I8 = jnp.bfloat16, jnp.float16, jnp.float32, jnp.int8
WINDOW = {"span": AttentionSpan(4096)}

# Name -> H, K, D, type of q, type of the cache, options.
FAMILIES: dict[str, tuple[int, int, int, DTypeLike, DTypeLike, dict[str, Any]]] = {
    "qwen3": (16, 8, 128, BF16, BF16, {}),
    "qwen3-int8": (16, 8, 128, BF16, I8, {}),
    "llama-3.2": (32, 8, 64, BF16, BF16, {}),
    "llama-4": (40, 8, 128, BF16, BF16, {"span": AttentionSpan(None, 8192)}),
    "gpt-oss": (64, 8, 64, BF16, BF16, {"span": AttentionSpan(128), "sinks": True}),
    "gemma-2": (8, 4, 256, BF16, BF16, {**WINDOW, "soft_cap": 50.0}),
    "gemma-int8": (8, 4, 256, BF16, I8, {}),
    "gemma-float32": (8, 4, 256, F32, F32, {}),
    "phi-2": (32, 32, 80, BF16, BF16, {}),
    "phi-3": (32, 32, 96, F16, F16, WINDOW),
    "small": (8, 4, 32, BF16, BF16, {}),
    "multi-query": (71, 1, 64, BF16, BF16, {}),
    "float16": (32, 8, 128, F16, F16, {}),
    "float32": (16, 8, 128, F32, F32, {}),
    "float32-of-int8": (16, 8, 128, F32, I8, {}),
}
# Name -> H, elements of a latent, of a rope key, type of q, type of the cache.
LATENT_FAMILIES: dict[str, tuple[int, int, int, DTypeLike, DTypeLike]] = {
    "deepseek-v2-lite": (16, 512, 64, BF16, BF16),
    "deepseek-v3": (128, 512, 64, BF16, BF16),
    "deepseek-int8": (16, 512, 64, BF16, I8),
    "deepseek-float32": (16, 512, 64, F32, F32),
    "minicpm3": (40, 256, 32, BF16, BF16),
}


@pytest.fixture(scope="module")
def mesh(gpu_target):
    return Mesh(np.array(parse_target(gpu_target).devices()[:1]), ("model",))


def lower(mesh: Mesh, function: Callable[..., Any], *shapes: Any, donated: tuple[int, ...] = ()) -> jax.stages.Lowered:
    sharding = NamedSharding(mesh, PartitionSpec())
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)
    with jax.set_mesh(mesh):
        return jax.jit(function, donate_argnums=donated).lower(*shapes)


def array(dtype: DTypeLike, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def cache_of(cache_layout: CacheLayout) -> PagedCache:
    return cache_layout.cache(array(cache_layout.dtype, NUM_BLOCKS, *cache_layout.shape))


def step(num_tokens: int) -> Batch:
    shapes = ((NUM_REQUESTS,), (NUM_REQUESTS, MAX_BLOCKS), (NUM_REQUESTS + 1,), (3,), (num_tokens,))
    return Batch(*(array(jnp.int32, *shape) for shape in shapes))


def assert_kernels_do_not_spill(kernels: list[AssembledKernel]) -> None:
    ours = [kernel for kernel in kernels if kernel.name.startswith("paged_")]
    print(*ours, sep="\n")
    assert {kernel.name for kernel in ours} == set(KERNELS)
    assert [kernel for kernel in ours if kernel.spilled_bytes] == []


@pytest.mark.parametrize(
    "name", [name if name.startswith("qwen3") else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_no_kernel_spills(name, mesh, tmp_path):
    num_heads, num_kv_heads, head_dim, dtype, cache_dtype, options = FAMILIES[name]
    sinks = array(dtype, num_heads) if "sinks" in options else None
    options = {key: value for key, value in options.items() if key != "sinks"}
    attend = functools.partial(gpu.ragged_paged_attention, scale=0.1, **options)
    cache = cache_of(layout.kv_cache_layout(BLOCK_SIZE, num_kv_heads, head_dim, cache_dtype)).array
    lowered = lower(
        mesh,
        lambda sinks, *operands: attend(*operands, sinks=sinks),
        sinks,
        array(dtype, 64, num_heads, head_dim),
        cache,
        step(64),
    )
    assert_kernels_do_not_spill(compiled_kernels(lowered, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("name", LATENT_FAMILIES)
def test_no_kernel_of_latent_attention_spills(name, mesh, tmp_path):
    num_heads, value_dim, rope_dim, dtype, cache_dtype = LATENT_FAMILIES[name]
    head_dim = value_dim + rope_dim
    attend = functools.partial(latent_gpu.latent_attention, value_dim=value_dim, scale=0.1)
    cache = cache_of(latent_layout.latent_cache_layout(BLOCK_SIZE, head_dim, cache_dtype)).array
    lowered = lower(mesh, attend, array(dtype, 64, num_heads, head_dim), cache, step(64))
    assert_kernels_do_not_spill(compiled_kernels(lowered, tmp_path))


@pytest.mark.parametrize("num_tokens", [1, 64])
def test_the_cache_is_written_and_read_in_place_without_loops(num_tokens, mesh):
    cache = cache_of(layout.kv_cache_layout(BLOCK_SIZE, 8, 128, BF16))
    kv = array(BF16, num_tokens, 8, 128)
    operands = (array(BF16, num_tokens, 16, 128), kv, kv, cache, step(num_tokens))
    attend = functools.partial(ragged_paged_attention, scale=0.1)
    program = read_program(lower(mesh, attend, *operands, donated=(3,)).compile())
    check_in_place(program, cache.array)


@pytest.mark.slow
def test_the_latent_cache_is_written_and_read_in_place_without_loops(mesh):
    cache = cache_of(latent_layout.latent_cache_layout(BLOCK_SIZE, 576, BF16))
    operands = (array(BF16, 64, 16, 576), array(BF16, 64, 576), cache, step(64))
    attend = functools.partial(latent_attention, value_dim=512, scale=0.1)
    program = read_program(lower(mesh, attend, *operands, donated=(2,)).compile())
    check_in_place(program, cache.array)


def test_attention_to_selected_tokens_writes_its_caches_in_place(mesh):
    """DeepSeek V3.2, on eight devices."""
    latents = cache_of(latent_layout.latent_cache_layout(BLOCK_SIZE, 576, BF16))
    with jax.set_mesh(mesh):  # or the layout is that of CPUs where the native kernels are installed
        keys = cache_of(index_cache_layout(BLOCK_SIZE, 128, BF16))
    queries = (array(BF16, 64, 16, 576), array(BF16, 64, 576), array(BF16, 64, 64, 128))

    def attend(latents: PagedCache, keys: PagedCache, *arrays: Any) -> Any:
        q, entries, index_q, weights, new_keys, batch = arrays
        keys, selection = select_tokens(index_q, weights, new_keys, keys, batch, num_selected=2048)
        latents, out = latent_attention(q, entries, latents, batch, selection, value_dim=512, scale=0.1)
        return latents, keys, out

    arrays = (latents, keys, *queries, array(F32, 64, 64), array(BF16, 64, 128), step(64))
    memory = lower(mesh, attend, *arrays, donated=(0, 1)).compile().memory_analysis()
    assert memory.alias_size_in_bytes == 2 * NUM_BLOCKS * BLOCK_SIZE * (576 + 128)
    assert memory.temp_size_in_bytes < 64 << 20


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_devices"), [("qwen3-0.6b", 1), ("qwen3-0.6b", 4), ("deepseek-v3", 8)])
def test_a_models_step_attends_without_loops_and_copies_no_cache(name, num_devices, gpu_target):
    """A step of 64 tokens; with several devices, each attends with its own heads."""
    devices = parse_target(f"{gpu_target}x{num_devices}").devices()
    runner = AbstractRunner(cut_model(name, num_devices), target_mesh(devices))
    program = read_program(runner.forward(64).compile())
    kernels = [kernel for kernel in program.text.kernels if kernel.name in KERNELS]
    assert len(kernels) == len(KERNELS) * NUM_LAYERS
    assert not any(kernel.is_in_loop for kernel in kernels)
    cache_bytes = bytes_per_device(runner.caches)
    assert program.memory.aliased >= cache_bytes
    assert [copy for copy in program.text.copies if copy.nbytes >= cache_bytes // NUM_LAYERS] == []
    assert program.text.num_loops == 0


def check_in_place(program: CompiledProgram, cache: jax.Array) -> None:
    assert program.text.num_loops == 0
    assert program.memory.aliased >= cache.size * cache.dtype.itemsize
    assert [copy for copy in program.text.copies if copy.nbytes > 1 << 20] == []
