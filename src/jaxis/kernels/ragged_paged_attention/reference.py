"""Definition of ragged paged attention in plain JAX; differentiable.

Every query gathers its whole context, so memory grows with T * S: this is the oracle for tests, not the fast path.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.kernels.batch import Batch
from jaxis.kernels.ragged_paged_attention.context_chunks import biases
from jaxis.kernels.ragged_paged_attention.layout import decode, split_kv


def ragged_paged_attention(
    q: jax.Array,
    kv_cache: jax.Array,
    batch: Batch,
    *,
    scale: float,
    span: AttentionSpan = FULL_CONTEXT,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    bias: jax.Array | None = None,
) -> jax.Array:
    num_tokens, num_heads, head_dim = q.shape
    _, block_size, combined_heads, _ = kv_cache.shape
    num_kv_heads = combined_heads // 2
    request, valid = batch.request_of_token()
    context_len = batch.block_tables.shape[1] * block_size

    context = decode(kv_cache[batch.block_tables[request]]).reshape(num_tokens, context_len, combined_heads, head_dim)
    k, v = split_kv(context)
    grouped = q.reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = jnp.einsum("tkgd,tskd->tkgs", grouped, k, preferred_element_type=jnp.float32) * scale
    position: jax.Array = batch.positions
    context_position = jnp.arange(context_len)
    if bias is not None:
        scores += biases(bias, position[:, None] - context_position).reshape(scores.shape)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)

    first = span.first_visible(position)
    last = span.last_visible(position, batch.seq_lens[request])
    visible = (context_position >= first[:, None]) & (context_position <= last[:, None]) & valid[:, None]
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    peak = jnp.max(scores, axis=-1, keepdims=True)
    peak = jnp.where(jnp.isfinite(peak), peak, 0.0)
    if sinks is not None:
        sinks = sinks.reshape(-1, num_kv_heads, num_heads // num_kv_heads, 1)
        peak = jnp.maximum(peak, sinks)
    weights = jnp.exp(scores - peak)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total += jnp.exp(sinks - peak)
    weights /= jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    v = jnp.where(visible[:, :, None, None], v, 0).astype(jnp.float32)
    return jnp.einsum("tkgs,tskd->tkgd", weights, v).reshape(q.shape).astype(q.dtype)
