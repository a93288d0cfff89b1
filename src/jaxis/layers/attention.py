"""Grouped-query attention: over the paged cache while serving, over whole sequences without one."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jaxis.kernels.ragged_paged_attention import ragged_paged_attention
from jaxis.kernels.ragged_paged_attention.layout import first_visible, request_of_token
from jaxis.kernels.rms_norm import rms_norm
from jaxis.kernels.rotary_embedding import HeadNorms
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.kv_cache_spec import KVCacheSpec
from jaxis.layers.linear import JaxLinear, apply_together
from jaxis.layers.module import JaxModule, calls_are_observed, make_parameter
from jaxis.layers.norm import JaxLayerNorm, JaxRmsNorm
from jaxis.layers.rope import RotaryEmbedding

if TYPE_CHECKING:
    from jaxis.quantization.config import QuantizationConfig


class GroupedQueryAttention(JaxModule):
    """Self-attention whose H query heads share K key-value heads (arXiv:2305.13245).

    Args:
      hidden_size: E.
      num_heads: H.
      num_kv_heads: K; divides H.
      head_dim: D.
      rngs: For the initial weights.
      rope: Turns queries and keys; None does not (a layer without positional encoding).
      scale: Multiplies the scores; None is D ** -0.5.
      qkv_bias, o_bias: Whether those projections have biases.
      packed_qkv: The checkpoint has one `qkv_proj` [(H + 2 K) D, E] in place of three matrices.
      q_norm, k_norm: Of queries and keys before the rope; both or neither. The shape of a norm's weight says what it is
        over: [D] each head, [H, D] or [K, D] each head with weights of its own, [H * D] or [K * D] all heads together.
      sliding_window: A token sees itself and this many - 1 before it; None sees all.
      attention_chunk_size: A token sees no further back than its own chunk of this many tokens; None sees all.
      soft_cap: Scores become `soft_cap * tanh(scores / soft_cap)`.
      use_sinks: Whether there is a parameter `sinks` [H], for each head a score without a value.
      dtype, quant_config, prefix: As for `JaxLinear`.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rngs: nnx.Rngs,
        *,
        rope: RotaryEmbedding | None,
        scale: float | None = None,
        qkv_bias: bool = False,
        o_bias: bool = False,
        packed_qkv: bool = False,
        q_norm: JaxRmsNorm | JaxLayerNorm | None = None,
        k_norm: JaxRmsNorm | JaxLayerNorm | None = None,
        sliding_window: int | None = None,
        attention_chunk_size: int | None = None,
        soft_cap: float | None = None,
        use_sinks: bool = False,
        dtype: Any,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.rope = rope
        self.scale = head_dim**-0.5 if scale is None else scale
        self.sliding_window = sliding_window
        self.attention_chunk_size = attention_chunk_size
        self.soft_cap = soft_cap

        def linear(name: str, size_in: int, size_out: int, axes: tuple[str, str], use_bias: bool) -> JaxLinear:
            return JaxLinear(
                size_in,
                size_out,
                rngs,
                use_bias=use_bias,
                dtype=dtype,
                kernel_axes=axes,
                quant_config=quant_config,
                prefix=f"{prefix}.{name}",
            )

        q_size, kv_size = num_heads * head_dim, num_kv_heads * head_dim
        self.qkv_proj = None
        if packed_qkv:
            self.qkv_proj = linear("qkv_proj", hidden_size, q_size + 2 * kv_size, ("heads", "embed"), qkv_bias)
        else:
            self.q_proj = linear("q_proj", hidden_size, q_size, ("heads", "embed"), qkv_bias)
            self.k_proj = linear("k_proj", hidden_size, kv_size, ("kv_heads", "embed"), qkv_bias)
            self.v_proj = linear("v_proj", hidden_size, kv_size, ("kv_heads", "embed"), qkv_bias)
        self.o_proj = linear("o_proj", q_size, hidden_size, ("embed", "heads"), o_bias)
        self.q_norm, self.k_norm = q_norm, k_norm
        self.sinks = None
        if use_sinks:
            self.sinks = make_parameter(rngs, nnx.initializers.zeros, (num_heads,), dtype, axes=("heads",))

    @property
    def kv_cache_spec(self) -> KVCacheSpec:
        """What the engine allocates for this layer."""
        return KVCacheSpec(self.num_kv_heads, self.head_dim, self.sliding_window, self.attention_chunk_size)

    def __call__(
        self, kv_cache: jax.Array | None, x: jax.Array, metadata: AttentionMetadata
    ) -> tuple[jax.Array | None, jax.Array]:
        """x [T, E] -> the updated cache (None without one) and [T, E]."""
        num_tokens = x.shape[0]
        q, k, v = self._project(x)
        norms = self._head_norms()
        if norms is None and self.q_norm is not None and self.k_norm is not None:
            q, k = _apply_norm(self.q_norm, q, self.head_dim), _apply_norm(self.k_norm, k, self.head_dim)
        kv_cache, out = attention(
            kv_cache,
            q.reshape(num_tokens, self.num_heads, self.head_dim),
            k.reshape(num_tokens, self.num_kv_heads, self.head_dim),
            v.reshape(num_tokens, self.num_kv_heads, self.head_dim),
            metadata,
            rope=self.rope,
            norms=norms,
            scale=self.scale,
            sliding_window=self.sliding_window,
            attention_chunk_size=self.attention_chunk_size,
            soft_cap=self.soft_cap,
            sinks=None if self.sinks is None else self.sinks[...],
        )
        return kv_cache, self.o_proj(out.reshape(num_tokens, self.num_heads * self.head_dim))

    def _project(self, x: jax.Array) -> Sequence[jax.Array]:
        """x [T, E] -> queries [T, H * D], keys and values [T, K * D]."""
        if self.qkv_proj is None:
            return apply_together(x, self.q_proj, self.k_proj, self.v_proj)
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return jnp.split(self.qkv_proj(x), [q_size, q_size + kv_size], axis=-1)

    def _head_norms(self) -> HeadNorms | None:
        """The norms as `attention` applies them together with the rope, if they are such."""
        norms = (self.q_norm, self.k_norm)
        if calls_are_observed() or not all(
            isinstance(norm, JaxRmsNorm) and norm.weight.shape == (self.head_dim,) for norm in norms
        ):
            return None
        return HeadNorms(self.q_norm.scale, self.k_norm.scale, self.q_norm.epsilon)


def _apply_norm(norm: JaxRmsNorm | JaxLayerNorm, x: jax.Array, head_dim: int) -> jax.Array:
    """x [T, heads * D] -> the same shape."""
    if norm.weight.shape == x.shape[1:]:
        return norm(x)
    return norm(x.reshape(x.shape[0], -1, head_dim)).reshape(x.shape)


def attention(
    kv_cache: jax.Array | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    metadata: AttentionMetadata,
    *,
    rope: RotaryEmbedding | None,
    scale: float,
    norms: HeadNorms | None = None,
    sliding_window: int | None = None,
    attention_chunk_size: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array | None, jax.Array]:
    """Rope, cache update and attention, for models whose projections are their own.

    Args:
      kv_cache: The layer's cache; None attends within whole sequences, each from its first token.
      q: [T, H, D], before norms and rope.
      k, v: [T, K, D], k before norms and rope.
      metadata: Of the step.
      rope: Turns queries and keys; None does not. For what comes between rope and attention: `turn`, then None.
      scale: Multiplies the scores.
      norms: Of each query and key head, before the rope; None for none.
      sliding_window: A token sees itself and this many - 1 before it; None sees all.
      attention_chunk_size: A token sees no further back than its own chunk of this many tokens; None sees all.
      soft_cap: Scores become `soft_cap * tanh(scores / soft_cap)`.
      sinks: [H], for each head a score without a value, which takes its share of the softmax.

    Returns:
      The updated cache (None without one), and [T, H, D].
    """
    q, k = turn(rope, q, k, metadata, norms=norms, is_paged=kv_cache is not None)
    options = _Options(scale, sliding_window, attention_chunk_size, soft_cap)
    if kv_cache is None:
        return None, _whole_sequence_attention(q, k, v, metadata, options, sinks)
    return _sharded_paged_attention(kv_cache, q, k, v, metadata, options, sinks)


def turn(
    rope: RotaryEmbedding | None,
    q: jax.Array,
    k: jax.Array,
    metadata: AttentionMetadata,
    *,
    norms: HeadNorms | None = None,
    is_paged: bool,
) -> tuple[jax.Array, jax.Array]:
    """Norms and rope of queries [T, H, D] and keys [T, K, D], as `attention` applies them.

    Args:
      rope: None for none.
      q, k: Before norms and rope.
      metadata: Of the step.
      norms: Of each query and key head, before the rope; None for none.
      is_paged: Whether a cache keeps the keys. Without one a sequence is whole, and a rope may look at its length.
    """
    if rope is None:
        if norms is None:
            return q, k
        return (
            rms_norm(q, norms.q_weight, epsilon=norms.epsilon),
            rms_norm(k, norms.k_weight, epsilon=norms.epsilon),
        )
    if is_paged:
        return rope(q, k, metadata.input_positions, norms=norms)
    request, _ = _requests(metadata)
    return rope(q, k, metadata.input_positions, metadata.seq_lens[request], norms)


class _Options(NamedTuple):
    """How scores are made, and what a token sees."""

    scale: float
    sliding_window: int | None
    attention_chunk_size: int | None
    soft_cap: float | None


def _requests(metadata: AttentionMetadata) -> tuple[jax.Array, jax.Array]:
    """Each token's request i32 [T], and whether it is one at all (bool [T])."""
    return request_of_token(
        metadata.query_start_loc, metadata.request_distribution[2], metadata.input_positions.shape[0]
    )


def _whole_sequence_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    metadata: AttentionMetadata,
    options: _Options,
    sinks: jax.Array | None,
) -> jax.Array:
    """Causal attention within each sequence."""
    request, valid = _requests(metadata)
    position = metadata.input_positions
    first = first_visible(position, options.sliding_window, options.attention_chunk_size)
    visible = (request[:, None] == request) & valid & (position <= position[:, None]) & (position >= first[:, None])
    # Padding tokens see themselves, so that their rows are finite.
    visible |= jnp.eye(q.shape[0], dtype=bool)
    if options.soft_cap is None and sinks is None:
        return jax.nn.dot_product_attention(q[None], k[None], v[None], mask=visible[None, None], scale=options.scale)[0]
    return _dense_attention(q, k, v, visible, options, sinks)


def _dense_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array, options: _Options, sinks: jax.Array | None
) -> jax.Array:
    """With what `jax.nn.dot_product_attention` does not have: soft caps and sinks. `visible` is bool [T, S]."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    grouped = q.reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = jnp.einsum("tkgd,skd->kgts", grouped, k, preferred_element_type=jnp.float32) * options.scale
    if options.soft_cap is not None:
        scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
    scores = jnp.where(visible, scores, -jnp.inf)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(num_kv_heads, -1, 1, 1)
        scores = jnp.concatenate([scores, jnp.broadcast_to(sink, (*scores.shape[:-1], 1))], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., :num_tokens].astype(v.dtype)
    out = jnp.einsum("kgts,skd->tkgd", weights, v, preferred_element_type=jnp.float32)
    return out.reshape(q.shape).astype(q.dtype)


def _sharded_paged_attention(
    kv_cache: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    metadata: AttentionMetadata,
    options: _Options,
    sinks: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """The paged kernel on each device's own heads.

    With fewer kv heads than devices the cache holds each head as often as there are devices that need it, so that
    each device keeps only the head its queries use.
    """
    kernel = functools.partial(ragged_paged_attention, **options._asdict())
    operands = (
        metadata.input_positions,
        metadata.seq_lens,
        metadata.block_tables_for(options.sliding_window, options.attention_chunk_size),
        metadata.query_start_loc,
        metadata.request_distribution,
    )
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.shape["model"] == 1:
        return kernel(q, k, v, kv_cache, *operands, sinks=sinks)

    copies = kv_cache.shape[2] // (2 * k.shape[1])
    if copies > 1:
        k, v = jnp.repeat(k, copies, axis=1), jnp.repeat(v, copies, axis=1)
    heads, cache_heads = PartitionSpec(None, "model", None), PartitionSpec(None, None, "model", None)
    return jax.shard_map(
        lambda sinks, *operands: kernel(*operands, sinks=sinks),
        in_specs=(PartitionSpec("model"), heads, heads, heads, cache_heads, *([PartitionSpec()] * len(operands))),
        out_specs=(cache_heads, heads),
        check_vma=False,
    )(sinks, q, k, v, kv_cache, *operands)
