"""Definition of latent attention in plain JAX; differentiable.

Every query gathers its whole context, so memory grows with T * S: this is the oracle for tests, not the fast path.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxis.kernels.batch import Batch
from jaxis.kernels.latent_attention.layout import decode


def latent_attention(
    q: jax.Array,
    kv_cache: jax.Array,
    batch: Batch,
    *,
    value_dim: int,
    scale: float,
    sinks: jax.Array | None = None,
) -> jax.Array:
    num_tokens = q.shape[0]
    context_len = batch.block_tables.shape[1] * kv_cache.shape[1]
    request, valid = batch.request_of_token()
    context = decode(kv_cache[batch.block_tables[request]], value_dim, q.shape[-1]).reshape(num_tokens, context_len, -1)
    visible = (jnp.arange(context_len) <= batch.positions[:, None]) & valid[:, None]
    # Unwritten entries are undefined: a NaN there must not spread.
    context = jnp.where(visible[..., None], context, 0)
    scores = jnp.einsum("thd,tsd->ths", q, context, preferred_element_type=jnp.float32) * scale
    scores = jnp.where(visible[:, None], scores, -jnp.inf)
    weights = jnp.where(valid[:, None, None], softmax_with_sinks(scores, None if sinks is None else sinks[:, None]), 0)
    return jnp.einsum("ths,tsd->thd", weights, context[..., :value_dim].astype(jnp.float32)).astype(q.dtype)


def softmax_with_sinks(scores: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Softmax of scores [..., S] and a sink, broadcast to [..., 1], that gets no weight; None: no sinks."""
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    sink = jnp.broadcast_to(sinks.astype(scores.dtype), (*scores.shape[:-1], 1))
    return jax.nn.softmax(jnp.concatenate([scores, sink], axis=-1), axis=-1)[..., :-1]
