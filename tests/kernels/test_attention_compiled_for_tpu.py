"""Paged and latent attention, compiled for TPUs that are not there: no cache is copied, and memory suffices."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxis.compilation.compiled_program import read_program
from jaxis.compilation.targets import parse_target
from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.kernels.batch import Batch
from jaxis.kernels.index_selection import index_cache_layout, select_blocks, select_tokens
from jaxis.kernels.latent_attention import latent_attention, latent_cache_layout
from jaxis.kernels.paged_cache import CacheLayout, PagedCache
from jaxis.kernels.ragged_paged_attention import kv_cache_layout, ragged_paged_attention
from jaxis.kernels.selected_attention import selected_attention, selected_cache_layout
from jaxis.layers.attention import attention
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.kv_cache_spec import KVCacheSpec
from jaxis.parallel.mesh import MESH_AXES

pytestmark = pytest.mark.compile_tpu

NUM_BLOCKS, MAX_BLOCKS, BLOCK_SIZE = 4096, 2560, 16
TARGETS = ["v5e-1", *(pytest.param(name, marks=pytest.mark.slow) for name in ("v6e-1", "v5p-8", "tpu7x-8"))]
of_every_tpu = pytest.mark.parametrize("target", TARGETS)
of_every_size = pytest.mark.parametrize(
    "num_tokens", [64, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 512))]
)


def mesh_of(target: str, num_devices: int) -> Mesh:
    """The first devices of a TPU, as its compiler describes them."""
    devices = parse_target(target).devices()
    return Mesh(np.asarray(devices[:num_devices]).reshape(1, -1), MESH_AXES)


def batch_of(mesh: Mesh, num_tokens: int) -> Batch:
    num_requests = min(num_tokens, 64)
    shapes = [(num_requests,), (num_requests, MAX_BLOCKS), (num_requests + 1,), (3,), (num_tokens,)]
    return Batch(*(array(mesh, shape, jnp.int32) for shape in shapes))


def array(mesh: Mesh, shape: tuple[int, ...], dtype: DTypeLike, *axes: str | None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))


def cache_of(mesh: Mesh, layout: CacheLayout) -> PagedCache:
    return layout.cache(array(mesh, (NUM_BLOCKS, *layout.shape), layout.dtype))


def check_leaves_the_cache_in_place(compiled: jax.stages.Compiled, cache: PagedCache, q: jax.ShapeDtypeStruct) -> None:
    entries = cache.array
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == math.prod(entries.sharding.shard_shape(entries.shape)) * entries.dtype.itemsize
    # Queries and outputs as tiles, in float32 at most, whose rows are whole lanes; new entries, and tables.
    tile_bytes = 4 * math.prod(q.shape[:-1]) * -(-q.shape[-1] // 128) * 128
    assert memory.temp_size_in_bytes < (2 << 20) + 4 * tile_bytes
    assert [copy for copy in read_program(compiled).text.copies if copy.nbytes >= memory.alias_size_in_bytes // 4] == []


# Head sizes, types and numbers of heads of families, with what their layers do.
CASES: dict[str, tuple[int, int, int, DTypeLike, DTypeLike, dict[str, Any]]] = {
    "Qwen3": (16, 8, 128, jnp.bfloat16, jnp.bfloat16, {}),
    "Gemma 2": (8, 4, 256, jnp.bfloat16, jnp.bfloat16, {"span": AttentionSpan(4096), "soft_cap": 50.0}),
    "GPT-OSS": (64, 8, 64, jnp.bfloat16, jnp.bfloat16, {"span": AttentionSpan(128), "sinks": True}),
    "Llama 4": (40, 8, 128, jnp.bfloat16, jnp.bfloat16, {"span": AttentionSpan(None, 8192)}),
    "Phi 3": (32, 32, 96, jnp.bfloat16, jnp.bfloat16, {"span": AttentionSpan(2047)}),
    "Phi 2": (32, 32, 80, jnp.bfloat16, jnp.bfloat16, {}),
    "Qwen2.5 0.5B": (14, 2, 64, jnp.bfloat16, jnp.bfloat16, {}),
    "one head of float32": (2, 1, 32, jnp.float32, jnp.float32, {}),
    "float32": (16, 8, 128, jnp.float32, jnp.float32, {}),
    "int8, 64": (32, 8, 64, jnp.bfloat16, jnp.int8, {}),
    "int8, 128": (32, 8, 128, jnp.bfloat16, jnp.int8, {}),
    "int8, 256": (8, 4, 256, jnp.bfloat16, jnp.int8, {}),
    "int8 of float32": (8, 4, 128, jnp.float32, jnp.int8, {}),
    "float16": (8, 4, 128, jnp.float16, jnp.bfloat16, {}),
}


OF_JAXS_KERNEL = {"Qwen3", "Phi 2"}


@of_every_tpu
@of_every_size
@pytest.mark.parametrize("case", CASES)
def test_paged_attention(target, num_tokens, case):
    num_heads, num_kv_heads, head_dim, dtype, cache_type, options = CASES[case]
    mesh = mesh_of(target, 1)
    options = dict(options)
    sinks = array(mesh, (num_heads,), dtype) if options.pop("sinks", False) else None
    with jax.set_mesh(mesh):
        cache = cache_of(mesh, kv_cache_layout(BLOCK_SIZE, num_kv_heads, head_dim, cache_type))
        q, k, v = (array(mesh, (num_tokens, heads, head_dim), dtype) for heads in (num_heads, *[num_kv_heads] * 2))
        attend = functools.partial(ragged_paged_attention, scale=0.1, **options)
        step = jax.jit(lambda sinks, *operands: attend(*operands, sinks=sinks), donate_argnums=4)
        compiled = step.lower(sinks, q, k, v, cache, batch_of(mesh, num_tokens)).compile()
    check_leaves_the_cache_in_place(compiled, cache, q)
    kernels = [kernel.name for kernel in read_program(compiled).text.kernels]
    assert any("ragged_paged_attention" in name for name in kernels) == (case in OF_JAXS_KERNEL), kernels


@of_every_tpu
@of_every_size
@pytest.mark.parametrize("num_heads", [16, pytest.param(128, marks=pytest.mark.slow)])
@pytest.mark.parametrize("cache_type", [jnp.bfloat16, pytest.param(jnp.int8, marks=pytest.mark.slow)])
def test_latent_attention(target, num_tokens, cache_type, num_heads):
    """DeepSeek V3, on eight devices and on one."""
    mesh = mesh_of(target, 1)
    with jax.set_mesh(mesh):
        cache = cache_of(mesh, latent_cache_layout(BLOCK_SIZE, 512, 64, cache_type))
        q, entries = (array(mesh, shape, jnp.bfloat16) for shape in ((num_tokens, num_heads, 576), (num_tokens, 576)))
        attend = functools.partial(latent_attention, value_dim=512, scale=0.1)
        compiled = jax.jit(attend, donate_argnums=2).lower(q, entries, cache, batch_of(mesh, num_tokens)).compile()
    check_leaves_the_cache_in_place(compiled, cache, q)


@of_every_tpu
@of_every_size
def test_attention_to_selected_tokens(target, num_tokens):
    """DeepSeek V3.2, on eight devices: without a kernel, and without a copy of a cache."""
    mesh, dtype = mesh_of(target, 1), jnp.bfloat16
    with jax.set_mesh(mesh):
        latents = cache_of(mesh, latent_cache_layout(BLOCK_SIZE, 512, 64, dtype))
        keys = cache_of(mesh, index_cache_layout(BLOCK_SIZE, 128, dtype))
        q, entries, index_q, new_keys = (
            array(mesh, (num_tokens, *shape), dtype) for shape in ((16, 576), (576,), (64, 128), (128,))
        )

        def step(latents: PagedCache, keys: PagedCache, *arrays: Any) -> Any:
            q, entries, index_q, weights, new_keys, batch = arrays
            keys, selection = select_tokens(index_q, weights, new_keys, keys, batch, num_selected=2048)
            latents, out = latent_attention(q, entries, latents, batch, selection, value_dim=512, scale=0.1)
            return latents, keys, out

        weights = array(mesh, (num_tokens, 64), jnp.float32)
        arrays = (latents, keys, q, entries, index_q, weights, new_keys, batch_of(mesh, num_tokens))
        memory = jax.jit(step, donate_argnums=(0, 1)).lower(*arrays).compile().memory_analysis()
    # The latents' rows are padded to whole lanes.
    assert memory.alias_size_in_bytes >= 2 * NUM_BLOCKS * BLOCK_SIZE * (576 + 128)
    assert memory.alias_size_in_bytes <= 2 * NUM_BLOCKS * BLOCK_SIZE * (640 + 128)
    # Scores of a tile's queries, and what its sort needs; selections and outputs of all queries.
    assert memory.temp_size_in_bytes < (32 << 20) + num_tokens * (2 * 4 * 2048 + 4 * 16 * 640)


@of_every_tpu
@of_every_size
def test_attention_to_blocks_that_heads_select(target, num_tokens):
    """MiniMax M3: heads write and read their parts of one cache in turns, without a copy of it."""
    mesh, dtype = mesh_of(target, 1), jnp.bfloat16
    with jax.set_mesh(mesh):
        cache = cache_of(mesh, selected_cache_layout(BLOCK_SIZE, 4, 128, dtype))
        keys = cache_of(mesh, index_cache_layout(BLOCK_SIZE, 128, dtype))
        heads = (64, 4, 4, 4)
        q, k, v, index_q = (array(mesh, (num_tokens, number, 128), dtype) for number in heads)
        new_keys = array(mesh, (num_tokens, 128), dtype)

        def step(cache: PagedCache, keys: PagedCache, *arrays: Any) -> Any:
            q, k, v, index_q, new_keys, batch = arrays
            keys, selection = select_blocks(index_q, new_keys, keys, batch, num_blocks=16, group_size=128)
            cache, out = selected_attention(q, k, v, cache, batch, selection, scale=0.1)
            return cache, keys, out

        arrays = (cache, keys, q, k, v, index_q, new_keys, batch_of(mesh, num_tokens))
        compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*arrays).compile()
    key_bytes = NUM_BLOCKS * BLOCK_SIZE * 128 * 2
    assert compiled.memory_analysis().alias_size_in_bytes == (4 * 2 + 1) * key_bytes
    assert [copy for copy in read_program(compiled).text.copies if copy.nbytes >= key_bytes // 4] == []


@pytest.mark.parametrize("num_kv_heads", [8, 2])
def test_each_device_has_its_own_heads(num_kv_heads):
    """Several heads on each of four devices, and two heads that four devices share."""
    mesh, num_tokens, head_dim, dtype = mesh_of("v5e-4", 4), 64, 128, jnp.bfloat16
    spec = KVCacheSpec(num_kv_heads, head_dim).on_devices(4)
    with jax.set_mesh(mesh):
        layout = spec.layout(BLOCK_SIZE, dtype)
        cache = layout.cache(array(mesh, (NUM_BLOCKS, *layout.shape), dtype, None, None, "model"))
        assert layout.head_axis == 2
        assert cache.array.sharding.shard_shape(cache.array.shape)[2] == 2 * max(1, num_kv_heads // 4)
        q, k, v = (
            array(mesh, (num_tokens, heads, head_dim), dtype, None, "model" if heads % 4 == 0 else None)
            for heads in (16, num_kv_heads, num_kv_heads)
        )

        def step(cache: PagedCache, q: jax.Array, k: jax.Array, v: jax.Array, batch: Batch) -> Any:
            seq_lens, block_tables, query_start_loc, distribution, positions = batch
            metadata = AttentionMetadata(positions, block_tables, seq_lens, query_start_loc, distribution)
            return attention(cache, q, k, v, metadata, rope=None, scale=0.1, span=FULL_CONTEXT)

        compiled = jax.jit(step, donate_argnums=0).lower(cache, q, k, v, batch_of(mesh, num_tokens)).compile()
    check_leaves_the_cache_in_place(compiled, cache, q)
