"""Rope, cache update and attention: over the paged cache while serving, over whole sequences without one."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.kernels import native
from jaxis.kernels.norms import rms_norm
from jaxis.kernels.paged_cache import PagedCache
from jaxis.kernels.ragged_paged_attention import kv_cache_layout, ragged_paged_attention
from jaxis.kernels.ragged_paged_attention.context_chunks import biases
from jaxis.kernels.rotary_embedding import HeadNorms
from jaxis.kernels.sequence_attention import sequence_attention, visible_tokens
from jaxis.layers.attention_metadata import AttentionMetadata, ScratchCache, in_consecutive_blocks
from jaxis.layers.rope import RotaryEmbedding
from jaxis.layers.uncached import KVCache, UncachedKeysAndValues, is_cache
from jaxis.parallel.mesh import on_each_device


def attention(
    kv_cache: KVCache,
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    metadata: AttentionMetadata,
    *,
    rope: RotaryEmbedding | None,
    scale: float,
    norms: HeadNorms | None = None,
    span: AttentionSpan = FULL_CONTEXT,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    bias: jax.Array | None = None,
) -> tuple[KVCache, jax.Array]:
    """Applies rope, updates the cache and attends, for models with custom projections.

    Args:
      kv_cache: Cache of the layer, or of the layer whose keys and values it shares. Without one, the batch holds whole
        sequences, each from its first token.
      q: [T, H, D], before norms and rope.
      k: [T, K, D], before norms and rope; None, with `v`, for a layer that attends to keys and values that another
        layer has cached in this step: it writes nothing.
      v: [T, K, D] or None.
      metadata: The step's batch.
      rope: Rotates queries and keys; None for no rope. To compute something between rope and scores, call `apply_rope`
        first and pass `rope=None`.
      scale: Multiplies the scores.
      norms: Norms over each query and key head, applied before the rope; None for none.
      span: The tokens that a token sees.
      soft_cap: Scores become `soft_cap * tanh(scores / soft_cap)`.
      sinks: [H], one extra score per head that has no value but takes part in the softmax; [T, H] if each token has its
        own.
      bias: [T, H, N], added to the scores before the soft cap: entry n to that of the key n tokens before; 0 beyond N.

    Returns:
      The updated cache (a `KVCache`), and [T, H, D].
    """
    is_paged = is_cache(kv_cache)
    if k is None:
        # No heads of keys.
        q, _ = apply_rope(rope, q, q[:, :0], metadata, norms=norms, is_paged=is_paged)
    else:
        q, k = apply_rope(rope, q, k, metadata, norms=norms, is_paged=is_paged)
    options, terms = _Options(scale, span, soft_cap), _Terms(sinks, bias)
    if kv_cache is None or isinstance(kv_cache, UncachedKeysAndValues):
        uncached, k, v = _of_whole_sequences(kv_cache, k, v)
        if metadata.scratch is not None:
            return uncached, _attention_through_scratch(q, k, v, metadata, metadata.scratch, options, terms)
        return uncached, _whole_sequence_attention(q, k, v, metadata, options, terms)
    kv_cache, out = _sharded_paged_attention(kv_cache, q, k, v, metadata, options, terms)
    if metadata.bidirectional is None:
        return kv_cache, out
    # Other tokens keep the bits of a step without bidirectional tokens.
    onward = options._replace(span=dataclasses.replace(span, lookahead=None))
    _, both = _sharded_paged_attention(kv_cache, q, None, None, metadata.of_segments(span), onward, terms)
    return kv_cache, jnp.where(metadata.bidirectional.is_bidirectional[:, None, None], both, out)


def apply_rope(
    rope: RotaryEmbedding | None,
    q: jax.Array,
    k: jax.Array,
    metadata: AttentionMetadata,
    *,
    norms: HeadNorms | None = None,
    is_paged: bool,
) -> tuple[jax.Array, jax.Array]:
    """Applies norms and rope, if any, to queries [T, H, D] and keys [T, K, D], as `attention` does.

    `is_paged` is True if the keys go into a cache. Without one, sequences are whole, and the rope may use their length.
    """
    if rope is None:
        if norms is None:
            return q, k
        return (
            rms_norm(q, norms.q_weight, epsilon=norms.epsilon),
            rms_norm(k, norms.k_weight, epsilon=norms.epsilon),
        )
    if is_paged or metadata.scratch is not None:
        return rope(q, k, metadata.positions_for_rope, norms=norms)
    request, _ = metadata.batch.request_of_token()
    return rope(q, k, metadata.input_positions, metadata.seq_lens[request], norms)


class _Options(NamedTuple):
    scale: float
    span: AttentionSpan
    soft_cap: float | None


class _Terms(NamedTuple):
    sinks: jax.Array | None
    bias: jax.Array | None


def _of_whole_sequences(
    shared: UncachedKeysAndValues | None, k: jax.Array | None, v: jax.Array | None
) -> tuple[UncachedKeysAndValues | None, jax.Array, jax.Array]:
    """Returns the layer's result in place of a cache, and the keys and values that it attends to: its own or shared."""
    if k is not None and v is not None:
        return None if shared is None else UncachedKeysAndValues(k, v), k, v
    if shared is None or shared.keys is None or shared.values is None:
        raise ValueError("a layer without keys and values needs those of another one")
    return shared, shared.keys, shared.values


def _whole_sequence_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    metadata: AttentionMetadata,
    options: _Options,
    terms: _Terms,
) -> jax.Array:
    first, last = _visible_ranges(metadata, options.span)
    if options.soft_cap is None and terms.sinks is None and terms.bias is None:
        return sequence_attention(q, k, v, first, last, scale=options.scale)
    return _dense_attention(q, k, v, visible_tokens(first, last), options, terms)


def _visible_ranges(metadata: AttentionMetadata, span: AttentionSpan) -> tuple[jax.Array, jax.Array]:
    """Returns the first and the last row of the flat batch that each token sees, i32 [T] each, for whole sequences."""
    request, valid = metadata.batch.request_of_token()
    position, row = metadata.input_positions, jnp.arange(metadata.input_positions.shape[0], dtype=jnp.int32)
    start = row - position
    first = start + span.first_visible(position)
    last = start + span.last_visible(position, metadata.seq_lens[request])
    # Padding tokens see themselves, to keep their rows finite.
    return jnp.where(valid, first, row), jnp.where(valid, last, row)


def _attention_through_scratch(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    metadata: AttentionMetadata,
    scratch: ScratchCache,
    options: _Options,
    terms: _Terms,
) -> jax.Array:
    """Runs the paged kernel within each sequence, with the derivative of the definition; rounding changes none."""
    described = dataclasses.replace(metadata, block_tables=None, state_slots=None, scratch=None)

    def paged(q: jax.Array, k: jax.Array, v: jax.Array, terms: _Terms, metadata: AttentionMetadata) -> jax.Array:
        layout = kv_cache_layout(scratch.block_size, k.shape[1], k.shape[2], scratch.dtype)
        batch, num_blocks = in_consecutive_blocks(metadata, scratch.block_size)
        cache = layout.cache(jnp.zeros((num_blocks, *layout.shape), layout.dtype))
        return ragged_paged_attention(q, k, v, cache, batch, **terms._asdict(), **options._asdict())[1]

    def definition(q: jax.Array, k: jax.Array, v: jax.Array, terms: _Terms, metadata: AttentionMetadata) -> jax.Array:
        k, v = (each.astype(scratch.dtype).astype(each.dtype) for each in (k, v))
        return _whole_sequence_attention(q, k, v, metadata, options, terms)

    return native.transformable(paged, definition)(q, k, v, terms, described)


def _dense_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array, options: _Options, terms: _Terms
) -> jax.Array:
    """Attention with soft caps, sinks and biases, which `sequence_attention` lacks. `visible` is bool [T, S]."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    grouped = q.reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = jnp.einsum("tkgd,skd->kgts", grouped, k, preferred_element_type=jnp.float32) * options.scale
    if terms.bias is not None:
        row = jnp.arange(num_tokens)
        scores = scores + biases(terms.bias, row[:, None] - row).swapaxes(0, 1).reshape(scores.shape)
    if options.soft_cap is not None:
        scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
    scores = jnp.where(visible, scores, -jnp.inf)
    if terms.sinks is not None:
        sink = terms.sinks.astype(jnp.float32).T.reshape(*scores.shape[:2], -1, 1)
        scores = jnp.concatenate([scores, jnp.broadcast_to(sink, (*scores.shape[:-1], 1))], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., :num_tokens].astype(v.dtype)
    out = jnp.einsum("kgts,skd->tkgd", weights, v, preferred_element_type=jnp.float32)
    return out.reshape(q.shape).astype(q.dtype)


def _sharded_paged_attention(
    kv_cache: PagedCache,
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    metadata: AttentionMetadata,
    options: _Options,
    terms: _Terms,
) -> tuple[PagedCache, jax.Array]:
    """Runs the paged kernel on each device's own heads; with fewer kv heads than devices, the cache repeats heads."""
    kernel = functools.partial(ragged_paged_attention, **options._asdict())
    batch = metadata.batch_for(options.span)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.shape["model"] == 1:
        return kernel(q, k, v, kv_cache, batch, **terms._asdict())

    copies = 1 if k is None else kv_cache.layout.num_heads // k.shape[1]
    if k is not None and v is not None and copies > 1:
        k, v = jnp.repeat(k, copies, axis=1), jnp.repeat(v, copies, axis=1)
    heads = PartitionSpec(None, "model", None)
    of_sinks = PartitionSpec("model") if terms.sinks is None or terms.sinks.ndim == 1 else PartitionSpec(None, "model")
    head_axis = kv_cache.layout.head_axis
    cache_heads = PartitionSpec(*("model" if axis == head_axis else None for axis in range(kv_cache.array.ndim)))
    return on_each_device(
        lambda sinks, bias, *operands: kernel(*operands, sinks=sinks, bias=bias),
        (of_sinks, heads, heads, heads, heads, cache_heads, PartitionSpec()),
        (cache_heads, heads),
    )(*terms, q, k, v, kv_cache, batch)
