"""Attention of grouped queries to selected tokens: against a dense definition, in chunks, int8, of each kv head."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxis.config.rope_config import RopeConfig
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.group_indexer import GroupIndexer, GroupIndexerSizes
from jaxis.layers.kv_cache_spec import HasCache, KVCacheSpec
from jaxis.layers.module import named_modules
from jaxis.layers.output_gate import OutputGate
from jaxis.layers.selected_attention import SelectedAttention
from tests.layers.layer_scopes import in_one_program, scope_of

HIDDEN, HEADS, KV_HEADS, BLOCK_SIZE, LENGTH = 32, 4, 2, 16, 40
CONFIG = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "rms_norm_eps": 1e-6}
GROUPS_OF_HEADS = ((0, 2), (0, 1))
SIZES = GroupIndexerSizes(num_heads=3, head_dim=16, group_size=4, num_groups=2)


class SelectsByPosition(GroupIndexer):
    """Groups 0 and 2, or 0 and 1 for the other kv heads, and the open tokens: a selection that needs no scores."""

    def __init__(self, scope, per_head):
        super().__init__(scope, SIZES, row_size=1)
        self.per_head = per_head

    def __call__(self, caches, x, query_input, metadata):
        if caches:
            return caches, jnp.stack([select(metadata.input_positions, g) for g in GROUPS_OF_HEADS], axis=1)[
                :, slice(None) if self.per_head else 0
            ]
        chosen = jnp.stack([visible(len(x), g) for g in GROUPS_OF_HEADS], axis=1)
        return (), chosen if self.per_head else chosen[:, 0]


def select(positions, groups):
    tokens = [*range(4 * groups[0], 4 * groups[0] + 4), *range(4 * groups[1], 4 * groups[1] + 4)]
    closed = jnp.broadcast_to(jnp.asarray(tokens), (len(positions), 8))
    opened = ((positions + 1) // 4 * 4)[:, None] + jnp.arange(3)
    listed = jnp.concatenate([closed, jnp.where(opened <= positions[:, None], opened, -1)], axis=1)
    return jnp.where(
        positions[:, None] < 11, jnp.where(jnp.arange(11) <= positions[:, None], jnp.arange(11), -1), listed
    )


def visible(length, groups):
    return (select(jnp.arange(length), groups)[:, :, None] == jnp.arange(length)).any(axis=1)


def make(*, per_head=False, head_dim=16, max_model_len=64):
    scope = scope_of(CONFIG | {"head_dim": head_dim}, max_model_len=max_model_len)
    return SelectedAttention(
        scope,
        make_indexer=lambda scope, _: SelectsByPosition(scope, per_head),
        rope_settings=RopeConfig(rope_type="default", theta=10000.0),
        qk_norm=True,
        output_gate=OutputGate("g_proj", per_head=True),
    )


def expected(attention, x, selections):
    """By a float64 softmax over what each kv head's selection shows, from the layer's own heads."""
    metadata = AttentionMetadata.for_whole_sequences([len(x)])
    q, k, v, gate = attention.heads(jnp.asarray(x), metadata, is_paged=True)
    q, k, v = (np.asarray(each, np.float64) for each in (q, k, v))
    out = np.zeros(q.shape)
    for head in range(HEADS):
        of = head // (HEADS // KV_HEADS)
        scores = np.where(selections[of], q[:, head] @ k[:, of].T * attention.scale, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, head] = weights / weights.sum(-1, keepdims=True) @ v[:, of]
    return np.asarray(attention.output(jnp.asarray(out, jnp.float32), gate))


def paged(attention, x, chunks, dtype: type = np.float32):
    specs = [module.kv_cache_spec for _, module in named_modules(attention) if isinstance(module, HasCache)]
    layouts = [spec.layout(BLOCK_SIZE, dtype) for spec in specs]
    caches = tuple(layout.cache(jnp.zeros((5, *layout.shape), layout.dtype)) for layout in layouts)
    graph, state = nnx.split(attention)
    run = jax.jit(lambda state, *operands: nnx.merge(graph, state)(*operands))
    outputs, start = [], 0
    for size in chunks:
        end = start + size
        metadata = AttentionMetadata(
            jnp.arange(start, end),
            jnp.asarray([[3, 1, 4]]),
            jnp.asarray([end]),
            jnp.asarray([0, size]),
            jnp.asarray([int(size == 1), 1, 1]),
        )
        caches, out = run(state, caches, x[start:end], metadata)
        outputs.append(out)
        start = end
    return np.concatenate(outputs)


@pytest.mark.parametrize("head_dim", [16, 12])
@pytest.mark.parametrize("per_head", [False, True])
def test_each_token_attends_to_what_is_selected(per_head, head_dim):
    attention = make(per_head=per_head, head_dim=head_dim)
    x = np.random.default_rng(0).standard_normal((LENGTH, HIDDEN), np.float32)
    groups = GROUPS_OF_HEADS
    shown = [visible(LENGTH, groups[head if per_head else 0]) for head in range(KV_HEADS)]
    wanted = expected(attention, x, shown)
    _, whole = in_one_program(attention, None, x, AttentionMetadata.for_whole_sequences([LENGTH]))
    np.testing.assert_allclose(whole, wanted, rtol=0, atol=2e-5)
    for chunks in ([LENGTH], [13, 1, 1, 25]):
        np.testing.assert_allclose(paged(attention, x, chunks), wanted, rtol=0, atol=2e-5)
    quantized = paged(attention, x, [LENGTH], dtype=np.int8)
    np.testing.assert_allclose(quantized, wanted, rtol=0, atol=0.05)


def test_an_engine_for_short_contexts_has_the_cache_and_the_bits_of_attention_to_everything():
    attention = make(max_model_len=11)
    specs = [module.kv_cache_spec for _, module in named_modules(attention) if isinstance(module, HasCache)]
    assert specs == [KVCacheSpec(KV_HEADS, 16, num_heads=HEADS)]
