"""The indexer of blocks: against transformers' module, whole sequences and the cache in chunks."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLIndexer, MiniMaxM3VLRotaryEmbedding

from jaxis.kernels import native
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.block_indexer import BlockIndexer
from jaxis.layers.group_indexer import GroupIndexerSizes
from jaxis.layers.rope import RotaryEmbedding
from jaxis.layers.weight_loader import JaxAutoWeightsLoader
from tests.layers.layer_scopes import in_one_program, scope_of

HIDDEN, BLOCK_SIZE = 32, 8
SIZES = GroupIndexerSizes(num_heads=2, head_dim=16, group_size=4, num_groups=3)


@pytest.fixture(scope="module")
def modules():
    """Transformers' indexer, its rope, and the indexer with its weights."""
    config = MiniMaxM3VLTextConfig(
        hidden_size=HIDDEN,
        head_dim=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        index_n_heads=SIZES.num_heads,
        index_head_dim=SIZES.head_dim,
        index_block_size=SIZES.group_size,
        index_topk_blocks=SIZES.num_groups,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    )
    module, rotary = MiniMaxM3VLIndexer(config, 0), MiniMaxM3VLRotaryEmbedding(cast("Any", config))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(0.5 * torch.randn(param.shape, generator=generator))
    rope = RotaryEmbedding(tuple(float(x) for x in rotary.inv_freq))
    indexer = BlockIndexer(scope_of({"hidden_size": HIDDEN, "rms_norm_eps": config.rms_norm_eps}), SIZES, rope=rope)
    weights = {name: value.numpy() for name, value in module.state_dict().items()}
    assert JaxAutoWeightsLoader(indexer).load_weights(weights.items()) == weights.keys()
    return module, rotary, indexer


def expected(modules, x):
    """bool [H, T, T] of one sequence."""
    module, rotary, _ = modules
    hidden, positions = torch.tensor(x)[None], torch.arange(len(x))[None]
    with torch.no_grad():
        blocks = module(hidden, rotary(hidden, positions), None, positions)[0].numpy()
    token = np.arange(len(x))
    chosen = (blocks[..., None] == token // SIZES.group_size).any(axis=2)
    return chosen & (token <= token[:, None])


def test_whole_sequences_select_as_transformers_does(modules):
    x = np.random.default_rng(0).standard_normal((45 + 30, HIDDEN), np.float32)
    metadata = AttentionMetadata.for_whole_sequences([45, 30])
    caches, selected = in_one_program(modules[2], (), x, x, metadata)
    assert caches == ()
    selected = np.moveaxis(np.asarray(selected), 1, 0)
    assert not selected[:, :45, 45:].any()
    np.testing.assert_array_equal(selected[:, :45, :45], expected(modules, x[:45]))
    np.testing.assert_array_equal(selected[:, 45:, 45:], expected(modules, x[45:]))


@pytest.mark.parametrize("kernels", ["native", "any"])
@pytest.mark.parametrize("dtype", [np.float32, np.int8])
def test_selections_from_a_cache_are_the_same_in_chunks(modules, dtype, kernels):
    if kernels == "native" and not native.usable():
        pytest.skip("the native library is not built")
    indexer = modules[2]
    x = np.random.default_rng(0).standard_normal((45, HIDDEN), np.float32)
    layout = dataclasses.replace(indexer.key_cache.kv_cache_spec.layout(BLOCK_SIZE, dtype), kernels=kernels)
    graph, state = nnx.split(indexer)
    run = jax.jit(lambda state, *operands: nnx.merge(graph, state)(*operands))

    def paged(chunks):
        caches = (layout.cache(jnp.full((9, *layout.shape), np.nan if dtype == np.float32 else 127, dtype)),)
        rows, start = [], 0
        for size in chunks:
            end = start + size
            metadata = AttentionMetadata(
                jnp.arange(start, end),
                jnp.asarray([[5, 2, 7, 1, 3, 8, 4]]),
                jnp.asarray([end]),
                jnp.asarray([0, size]),
                jnp.asarray([int(size == 1), 1, 1]),
            )
            caches, selected = run(state, caches, x[start:end], x[start:end], metadata)
            rows.append(np.asarray(selected))
            start = end
        return np.concatenate(rows)

    whole = paged([45])
    np.testing.assert_array_equal(paged([18, 1, 1, 1, 24]), whole)
    if dtype == np.float32:
        found = (whole[..., None] == np.arange(45)).any(axis=2)
        np.testing.assert_array_equal(found.transpose(1, 0, 2), expected(modules, x))
