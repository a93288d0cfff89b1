"""How large the cache's pools are: arithmetic."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

from jaxis.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.config.hf_config import HFConfig
from jaxis.engine.execution import cache_memory
from jaxis.engine.execution.kv_cache import block_bytes, num_cache_blocks, plan_caches
from jaxis.errors import EngineError
from jaxis.layers.kv_cache_spec import KVCacheSpec
from jaxis.layers.mla import LatentCacheSpec
from jaxis.parallel.mesh import MESH_AXES, make_mesh

WINDOW = AttentionSpan(64)
KIB = 1024


def sizes(
    bytes_per_block: dict[AttentionSpan, int], memory: int, *, max_model_len: int = 4096, max_num_seqs: int = 4
) -> tuple[dict[AttentionSpan, int], int]:
    """Blocks of 16 tokens; steps of up to 64 tokens."""
    config = VllmConfig(
        ModelConfig("", HFConfig({}), max_model_len=max_model_len),
        cache_config=CacheConfig(kv_cache_memory_bytes=memory),
        scheduler_config=SchedulerConfig(max_num_seqs, 64),
    )
    return num_cache_blocks(config, bytes_per_block, make_mesh())


def test_layers_of_a_span_share_blocks_and_full_context_comes_first() -> None:
    full, window, chunk = KVCacheSpec(2, 16), KVCacheSpec(2, 16, WINDOW), KVCacheSpec(4, 16, AttentionSpan(None, 128))
    bytes_of = block_bytes([window, chunk, full, window, window], 16, jnp.float32, make_mesh())
    layer = 2 * 16 * 2 * 16 * 4
    assert bytes_of == {FULL_CONTEXT: layer, AttentionSpan(None, 128): 2 * layer, WINDOW: 3 * layer}
    assert list(bytes_of) == [FULL_CONTEXT, AttentionSpan(None, 128), WINDOW]


def test_a_cache_that_is_not_sharded_counts_on_every_device() -> None:
    """Key-value heads are spread over the devices, latents are whole on each."""
    heads, latents = KVCacheSpec(8, 128), LatentCacheSpec(512, 64)
    for num_devices in (1, 4):
        mesh = AbstractMesh((1, num_devices), MESH_AXES)
        assert block_bytes([heads] * 2, 16, jnp.bfloat16, mesh) == {FULL_CONTEXT: 2 * 16 * 2 * 8 * 128 * 2}
        latent_bytes = block_bytes([latents.on_devices(num_devices)] * 3, 16, jnp.bfloat16, mesh)
        assert latent_bytes == {FULL_CONTEXT: num_devices * 3 * 16 * (512 + 64) * 2}
        divided = dataclasses.replace(latents, context_devices=num_devices)
        assert block_bytes([divided] * 3, 16, jnp.bfloat16, mesh) == {FULL_CONTEXT: 3 * 16 * (512 + 64) * 2}


def test_a_window_gets_what_is_of_use_and_full_context_the_rest() -> None:
    # A window of 64 touches at most 4 + 2 blocks, four of them and a step's 64 tokens 28; twice that.
    blocks, max_model_len = sizes({FULL_CONTEXT: 2 * KIB, WINDOW: 10 * KIB}, 1000 * KIB)
    assert blocks == {FULL_CONTEXT: (1000 - 56 * 10) // 2, WINDOW: 56}
    assert max_model_len == 220 * 16


def test_with_little_memory_every_pool_has_as_many_blocks() -> None:
    blocks, max_model_len = sizes({FULL_CONTEXT: 2 * KIB, WINDOW: 10 * KIB}, 125 * KIB)
    assert blocks == {FULL_CONTEXT: 10, WINDOW: 10}
    assert max_model_len == 160
    blocks, max_model_len = sizes({FULL_CONTEXT: 2 * KIB, WINDOW: 10 * KIB}, 12 * KIB)
    assert (blocks, max_model_len) == ({FULL_CONTEXT: 1, WINDOW: 1}, 16)


def test_no_pool_is_larger_than_it_can_be_of_use() -> None:
    blocks, max_model_len = sizes({FULL_CONTEXT: KIB, WINDOW: KIB}, 1 << 30, max_model_len=100, max_num_seqs=2)
    assert blocks == {FULL_CONTEXT: 13, WINDOW: 13}
    assert max_model_len == 100


@pytest.mark.parametrize(("num_blocks", "max_model_len"), [(9, 9 * 16), (10, 4096), (500, 4096)])
def test_windows_alone_do_not_limit_the_length_once_one_fits(num_blocks: int, max_model_len: int) -> None:
    """A sequence holds 4 + 2 blocks and those of a step's 64 tokens."""
    assert sizes({WINDOW: KIB}, num_blocks * KIB) == ({WINDOW: num_blocks}, max_model_len)


def test_a_given_number_of_blocks_is_that_of_every_pool_and_bounds_the_length() -> None:
    config = VllmConfig(ModelConfig("", HFConfig({}), dtype=jnp.float32, max_model_len=4096))
    specs = [KVCacheSpec(2, 16, WINDOW), KVCacheSpec(2, 16)]
    plan = plan_caches(specs, config, make_mesh(), memory=0, num_blocks=9)
    assert plan.num_blocks == {FULL_CONTEXT: 9, WINDOW: 9}
    assert [jax.tree.leaves(struct)[0].shape[0] for struct in plan.structs] == [9, 9]
    assert plan.max_model_len == 9 * 16


def test_memory_for_less_than_a_block_in_every_layer() -> None:
    with pytest.raises(EngineError, match=r"needs at least 12\.0 MiB for one block of 16 tokens, and 11\.0 MiB"):
        sizes({FULL_CONTEXT: 2 << 20, WINDOW: 10 << 20}, 11 << 20)


def test_with_five_windows_for_each_full_layer_the_same_memory_holds_a_longer_context(monkeypatch) -> None:
    """Gemma 3's 27B in 16 GiB, bfloat16: 52 layers with windows of 1024, 10 with full context, 16 kv heads of 128."""
    monkeypatch.setattr(cache_memory, "free_host_bytes", lambda: 1 << 40)
    layer = KVCacheSpec(16, 128)
    window = KVCacheSpec(16, 128, AttentionSpan(1024))
    bytes_of = block_bytes([window] * 52 + [layer] * 10, 16, jnp.bfloat16, make_mesh())
    all_full = {FULL_CONTEXT: sum(bytes_of.values())}
    assert sizes(all_full, 16 << 30, max_model_len=131072) == ({FULL_CONTEXT: 2114}, 33824)
    blocks, max_model_len = sizes(bytes_of, 16 << 30, max_model_len=131072)
    assert blocks == {FULL_CONTEXT: 10320, AttentionSpan(1024): 536}
    assert max_model_len == 131072
    assert sum(bytes_of[span] * number for span, number in blocks.items()) <= 16 << 30
