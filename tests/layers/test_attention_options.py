"""Attention: the tokens it sees and their scores, whole and paged, against float64 numpy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.errors import ConfigError
from jaxis.kernels.ragged_paged_attention import kv_cache_layout
from jaxis.layers.attention import attention
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.qkv_packing import PACKED
from jaxis.layers.query_scale import QueryScale
from jaxis.models.mimo_v2_flash import MiMoAttention
from jaxis.parallel.mesh import make_mesh
from tests.layers.layer_scopes import scope_of
from tests.support.simulated_devices import run_on_devices

LENGTHS = (37, 1, 22)
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 4, 2, 16, 16
SCALE = 0.4
SINKS = np.array([0.5, -1.0, 2.0, 0.0], np.float32)
TOKEN_SINKS = np.random.default_rng(1).standard_normal((sum(LENGTHS), HEADS)).astype(np.float32)
BIAS = np.random.default_rng(2).standard_normal((sum(LENGTHS), HEADS, 7)).astype(np.float32)
OPTIONS = {
    "plain": {},
    "window": {"span": AttentionSpan(5)},
    "chunks": {"span": AttentionSpan(None, 8)},
    "window and chunks": {"span": AttentionSpan(3, 8)},
    "soft cap": {"soft_cap": 1.5},
    "sinks": {"sinks": SINKS},
    "bias": {"bias": BIAS},
    "bias and sinks of tokens": {"span": AttentionSpan(11), "soft_cap": 1.5, "sinks": TOKEN_SINKS, "bias": BIAS},
    "all": {"span": AttentionSpan(11, 16), "soft_cap": 1.5, "sinks": SINKS},
}
options = pytest.mark.parametrize("option", OPTIONS)


def operands() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal((sum(LENGTHS), n, HEAD_DIM)).astype(np.float32) for n in (4, 2, 2))


def expected(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    span: AttentionSpan = FULL_CONTEXT,
    soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
    bias: np.ndarray | None = None,
) -> np.ndarray:
    sliding_window, attention_chunk_size = span.sliding_window or 10**6, span.attention_chunk_size or 10**6
    out = np.zeros(q.shape)
    for length, end in zip(LENGTHS, np.cumsum(LENGTHS), strict=True):
        for t in range(length):
            in_chunk = range(t - t % attention_chunk_size, t + 1)
            seen = [u for u in in_chunk if t - u < sliding_window]
            for head in range(HEADS):
                keys, values = (x[end - length + np.array(seen), head // 2].astype(np.float64) for x in (k, v))
                scores = keys @ q[end - length + t, head].astype(np.float64) * SCALE
                if bias is not None:
                    scores += [bias[end - length + t, head, t - u] if t - u < bias.shape[2] else 0 for u in seen]
                if soft_cap is not None:
                    scores = soft_cap * np.tanh(scores / soft_cap)
                weights = np.exp(scores)
                own = None if sinks is None else sinks[head] if sinks.ndim == 1 else sinks[end - length + t, head]
                total = weights.sum() + (0 if own is None else np.exp(float(own)))
                out[end - length + t, head] = weights @ values / total
    return out


def paged_metadata() -> AttentionMetadata:
    whole = AttentionMetadata.for_whole_sequences(LENGTHS)
    tables = np.array([[5, 2, 7], [1, 0, 0], [3, 6, 0]], np.int32)
    return AttentionMetadata(
        whole.input_positions,
        jnp.asarray(tables),
        whole.seq_lens,
        whole.query_start_loc,
        jnp.asarray([0, len(LENGTHS), len(LENGTHS)], jnp.int32),
    )


def paged(q: np.ndarray, k: np.ndarray, v: np.ndarray, mesh: jax.sharding.Mesh, **option: Any) -> jax.Array:
    with jax.set_mesh(mesh):
        layout = kv_cache_layout(BLOCK_SIZE, max(KV_HEADS, mesh.shape["model"]), HEAD_DIM, jnp.float32)
        cache = layout.cache(jnp.zeros((8, *layout.shape)))
        run = jax.jit(
            lambda cache, terms: attention(cache, q, k, v, paged_metadata(), rope=None, scale=SCALE, **terms, **option)[
                1
            ]
        )
        return run(cache, {name: option.pop(name) for name in ("sinks", "bias") if name in option})


@pytest.mark.sampled(4)
@options
def test_whole_sequences_equal_dense_attention(option):
    q, k, v = operands()
    metadata = AttentionMetadata.for_whole_sequences(LENGTHS)
    run = jax.jit(lambda *heads: attention(None, *heads, metadata, rope=None, scale=SCALE, **OPTIONS[option]))
    cache, out = run(q, k, v)
    assert cache is None
    np.testing.assert_allclose(out, expected(q, k, v, **OPTIONS[option]), rtol=0, atol=2e-6)


def check_paged(option: str, num_devices: int) -> None:
    q, k, v = operands()
    out = paged(q, k, v, make_mesh(num_devices), **OPTIONS[option])
    np.testing.assert_allclose(out, expected(q, k, v, **OPTIONS[option]), rtol=0, atol=2e-6)


@options
def test_a_paged_cache_equals_dense_attention(option):
    check_paged(option, 1)


@pytest.mark.slow
@pytest.mark.multi_device
@pytest.mark.production_xla
def test_sharded_heads_equal_dense_attention():
    """Two kv heads on two devices, and on four that share them."""
    checks = "[check_paged(o, n) for o in ('plain', 'all', 'bias and sinks of tokens') for n in (2, 4)]"
    script = f"from tests.layers.test_attention_options import check_paged; {checks}"
    run_on_devices("-c", script, xla_flags="")


def test_padding_rows_are_finite_with_soft_caps_and_sinks():
    q, k, v = operands()
    metadata = AttentionMetadata.for_whole_sequences(LENGTHS)
    shorter = AttentionMetadata(
        metadata.input_positions, None, metadata.seq_lens, metadata.query_start_loc, jnp.asarray([0, 1, 1])
    )
    _, out = attention(None, q, k, v, shorter, rope=None, scale=SCALE, soft_cap=2.0, sinks=SINKS)
    assert np.isfinite(out).all()


def mimo_attention(value_dim: int) -> MiMoAttention:
    config = {**SIZES, "num_hidden_layers": 1, "v_head_dim": value_dim}
    return MiMoAttention(scope_of(config, prefix="model.layers.0.self_attn"))


def test_devices_that_share_heads_have_the_rows_of_smaller_values_too():
    """Two kv heads, of keys of 16 and values of 12, on four devices."""
    layer = mimo_attention(value_dim=12)
    keys, values = (np.arange(2 * size).reshape(2, size)[[0, 0, 1, 1]] for size in (16, 12))
    for order, rows in zip(layer.row_orders(4), (keys, values), strict=True):
        np.testing.assert_array_equal(order.rows, rows.ravel())
    assert layer.kv_cache_spec.head_dim == 16


def test_devices_that_share_packed_heads_have_a_part_each():
    queries, keys = np.arange(4 * 16).reshape(4, 16), np.arange(2 * 16).reshape(2, 16)[[0, 0, 1, 1]]
    [order] = GroupedQueryAttention(scope_of(SIZES), packing=PACKED).row_orders(4)
    rows = np.concatenate([queries, 64 + keys, 64 + 32 + keys], axis=1)
    np.testing.assert_array_equal(order.rows, rows.ravel())


def test_values_larger_than_keys_are_refused():
    with pytest.raises(ConfigError, match="values of 20 dimensions, more than the 16 of keys"):
        mimo_attention(value_dim=20)


SIZES = {
    **{"hidden_size": 12, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM},
    "rms_norm_eps": 1e-6,
}


def test_queries_are_scaled_by_the_logarithm_of_their_interval():
    q, positions = np.ones((4, HEADS, HEAD_DIM), np.float32), np.array([0, 7, 8, 31])
    np.testing.assert_allclose(
        QueryScale(0.5, 8, 31)(jnp.asarray(q), jnp.asarray(positions))[:, 0, 0],
        1 + 0.5 * np.log([1, 1, 2, 4]),
        rtol=1e-6,
    )
    # Llama 4 counts positions from 1.
    np.testing.assert_allclose(
        QueryScale(0.5, 8, 31, offset=1)(jnp.asarray(q), jnp.asarray(positions))[:, 0, 0],
        1 + 0.5 * np.log([1, 2, 2, 5]),
        rtol=1e-6,
    )
