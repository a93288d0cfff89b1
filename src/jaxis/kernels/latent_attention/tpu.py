"""Latent attention on TPU: the kernels of ragged paged attention with one kv head, whose keys begin with its values."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxis.config.attention_span import FULL_CONTEXT
from jaxis.kernels.ragged_paged_attention import tpu
from jaxis.kernels.ragged_paged_attention.tpu_layout import PageLayout
from jaxis.kernels.ragged_paged_attention.tpu_tile import Scoring


def latent_attention(
    q: jax.Array,
    entries: jax.Array,
    kv_cache: jax.Array,
    seq_lens: jax.Array,
    block_tables: jax.Array,
    query_start_loc: jax.Array,
    request_distribution: jax.Array,
    *,
    value_dim: int,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """Writes the entries into the cache, in place if it is donated, then attends to it."""
    page = PageLayout.of_latents(1, value_dim, q.shape[-1] - value_dim, kv_cache.dtype).of_cache(kv_cache.shape)
    latents, rope_keys = jnp.split(entries[:, None], [value_dim], axis=-1)
    queries = page.pad(jnp.split(q, [value_dim], axis=-1))
    step = tpu.FlatBatch(seq_lens, block_tables, query_start_loc, request_distribution)
    scoring = Scoring(scale, FULL_CONTEXT, soft_cap=None)
    kv_cache, out = tpu.write_and_attend(queries, (latents, rope_keys), kv_cache, step, None, page, scoring)
    return kv_cache, out[..., :value_dim]
