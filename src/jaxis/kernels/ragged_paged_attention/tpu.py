"""Ragged paged attention on TPU: JAX's own Pallas kernel where it applies, else plain JAX.

The kernel has run on TPUs, in other engines. `docs/accelerators.md` says what it does not compute, and why.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import ragged_paged_attention as pallas

from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.kernels.batch import Batch
from jaxis.kernels.hbm import in_hbm
from jaxis.kernels.ragged_paged_attention import blockwise
from jaxis.kernels.ragged_paged_attention.tpu_layout import LANES, padded_size, read_heads, write_heads

# Of pages, their tokens, and queries that are computed at a time, as in most entries of the kernel's table of measured
# sizes. It is not asked, since it knows only attached devices.
MOST_PAGES, MOST_TOKENS, MOST_QUERIES = 16, 1024, 32
VMEM_BYTES = 48 << 20  # a TPU7x has 64 MiB, others 128
TABLE_BYTES = 768 << 10  # of block tables, which are in the scalar memory of 1 MiB

Shaped = jax.Array | jax.ShapeDtypeStruct


def ragged_paged_attention(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    kv_cache: jax.Array,
    batch: Batch,
    *,
    block_size: int,
    scale: float,
    span: AttentionSpan = FULL_CONTEXT,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    bias: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    head_dim = q.shape[-1]
    if k is not None and v is not None:
        places = batch.places(block_size, len(kv_cache))
        kv_cache = write_heads(kv_cache, k, v, places, block_size)
    padded = jnp.pad(q, ((0, 0), (0, 0), (0, padded_size(head_dim) - head_dim)))
    is_plain = span == FULL_CONTEXT and sinks is None and bias is None
    if is_plain and supports(padded, kv_cache, batch.block_tables):
        out = _by_kernel(padded, kv_cache, batch, scale=scale, soft_cap=soft_cap)
    else:
        read = functools.partial(read_heads, head_dim=head_dim, block_size=block_size, dtype=q.dtype)
        out = blockwise.ragged_paged_attention(
            *(padded, kv_cache, batch),
            **{"scale": scale, "span": span, "soft_cap": soft_cap, "sinks": sinks, "bias": bias},
            read_blocks=read,
        )
    return kv_cache, out[..., :head_dim]


def supports(q: Shaped, kv_cache: Shaped, block_tables: Shaped) -> bool:
    """Returns whether JAX's kernel takes queries of padded heads, this cache and these tables."""
    block_size, num_rows, width = kv_cache.shape[1:]
    num_kv_heads = num_rows * width // (2 * q.shape[-1])
    are_whole_tiles = num_kv_heads in (1, 2, 4) or num_kv_heads % 8 == 0
    is_bfloat16 = q.dtype == kv_cache.dtype == jnp.bfloat16
    fits = block_size <= MOST_TOKENS and block_tables.size * block_tables.dtype.itemsize <= TABLE_BYTES
    return is_bfloat16 and q.shape[-1] == LANES and are_whole_tiles and fits


def _by_kernel(
    q: jax.Array,
    kv_cache: jax.Array,
    batch: Batch,
    *,
    scale: float,
    soft_cap: float | None,
) -> jax.Array:
    """Returns [T, H, 128]; padding rows are 0."""
    seq_lens, block_tables, query_start_loc = batch[:3]
    _, valid = batch.request_of_token()
    # The kernel reads ahead, and waits only for requests with tokens: there must be one, and none without at the end.
    rows = jnp.where(valid[0], query_start_loc, jnp.minimum(jnp.arange(len(query_start_loc)), 1))
    num_requests = jnp.sum(rows[:-1] < jnp.maximum(jnp.sum(valid), 1), dtype=jnp.int32)
    out = pallas.ragged_paged_attention(
        q,
        in_hbm(kv_cache),
        jnp.maximum(seq_lens, 1),
        block_tables,
        rows,
        num_requests[None],
        sm_scale=scale,
        soft_cap=soft_cap,
        num_kv_pages_per_block=min(MOST_PAGES, MOST_TOKENS // kv_cache.shape[1], block_tables.shape[1]),
        num_queries_per_block=min(MOST_QUERIES, len(q)),
        vmem_limit_bytes=VMEM_BYTES,
    )
    return jnp.where(valid[:, None, None], out, 0)
