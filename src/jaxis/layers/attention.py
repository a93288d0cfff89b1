"""Grouped-query attention: over the paged cache while serving, over whole sequences without one."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jaxis.kernels.ragged_paged_attention import ragged_paged_attention
from jaxis.kernels.ragged_paged_attention.layout import request_of_token
from jaxis.kernels.rotary_embedding import HeadNorms
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.kv_cache_spec import KVCacheSpec
from jaxis.layers.linear import JaxLinear, apply_together
from jaxis.layers.module import JaxModule, calls_are_observed
from jaxis.layers.norm import JaxRmsNorm
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
      rope: Turns queries and keys.
      scale: Multiplies the scores; None is D ** -0.5.
      qkv_bias, o_bias: Whether those projections have biases.
      qk_norm_epsilon: Not None: queries and keys get an RMS norm a head, with this epsilon, before the rope.
      sliding_window: A token sees itself and this many - 1 before it; None sees all.
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
        rope: RotaryEmbedding,
        scale: float | None = None,
        qkv_bias: bool = False,
        o_bias: bool = False,
        qk_norm_epsilon: float | None = None,
        sliding_window: int | None = None,
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
        self.q_proj = linear("q_proj", hidden_size, q_size, ("heads", "embed"), qkv_bias)
        self.k_proj = linear("k_proj", hidden_size, kv_size, ("kv_heads", "embed"), qkv_bias)
        self.v_proj = linear("v_proj", hidden_size, kv_size, ("kv_heads", "embed"), qkv_bias)
        self.o_proj = linear("o_proj", q_size, hidden_size, ("embed", "heads"), o_bias)
        self.q_norm = self.k_norm = None
        if qk_norm_epsilon is not None:
            self.q_norm = JaxRmsNorm(head_dim, rngs, epsilon=qk_norm_epsilon, dtype=dtype)
            self.k_norm = JaxRmsNorm(head_dim, rngs, epsilon=qk_norm_epsilon, dtype=dtype)

    @property
    def kv_cache_spec(self) -> KVCacheSpec:
        """What the engine allocates for this layer."""
        return KVCacheSpec(self.num_kv_heads, self.head_dim, self.sliding_window)

    def __call__(
        self, kv_cache: jax.Array | None, x: jax.Array, metadata: AttentionMetadata
    ) -> tuple[jax.Array | None, jax.Array]:
        """x [T, E] -> the updated cache (None without one) and [T, E]."""
        num_tokens = x.shape[0]
        q, k, v = apply_together(x, self.q_proj, self.k_proj, self.v_proj)
        q = q.reshape(num_tokens, self.num_heads, self.head_dim)
        k = k.reshape(num_tokens, self.num_kv_heads, self.head_dim)
        v = v.reshape(num_tokens, self.num_kv_heads, self.head_dim)
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            if calls_are_observed():
                q, k = self.q_norm(q), self.k_norm(k)
            else:
                norms = HeadNorms(self.q_norm.weight[...], self.k_norm.weight[...], self.q_norm.epsilon)
        kv_cache, out = attention(
            kv_cache,
            q,
            k,
            v,
            metadata,
            rope=self.rope,
            norms=norms,
            scale=self.scale,
            sliding_window=self.sliding_window,
        )
        return kv_cache, self.o_proj(out.reshape(num_tokens, self.num_heads * self.head_dim))


def attention(
    kv_cache: jax.Array | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    metadata: AttentionMetadata,
    *,
    rope: RotaryEmbedding,
    scale: float,
    norms: HeadNorms | None = None,
    sliding_window: int | None = None,
) -> tuple[jax.Array | None, jax.Array]:
    """Rope, cache update and attention, for models whose projections are their own.

    Args:
      kv_cache: The layer's cache; None attends within whole sequences, each from its first token.
      q: [T, H, D], before norms and rope.
      k, v: [T, K, D], k before norms and rope.
      metadata: Of the step.
      rope: Turns queries and keys.
      scale: Multiplies the scores.
      norms: Of each query and key head, before the rope; None for none.
      sliding_window: A token sees itself and this many - 1 before it; None sees all.

    Returns:
      The updated cache (None without one), and [T, H, D].
    """
    if kv_cache is None:
        request, valid = request_of_token(
            metadata.query_start_loc, metadata.request_distribution[2], metadata.input_positions.shape[0]
        )
        q, k = rope(q, k, metadata.input_positions, metadata.seq_lens[request], norms)
        return None, _whole_sequence_attention(q, k, v, request, valid, scale, sliding_window)
    q, k = rope(q, k, metadata.input_positions, norms=norms)
    return _sharded_paged_attention(kv_cache, q, k, v, metadata, scale, sliding_window)


def _whole_sequence_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    request: jax.Array,
    valid: jax.Array,
    scale: float,
    sliding_window: int | None,
) -> jax.Array:
    """Causal attention within each sequence; `request` i32 [T] and `valid` bool [T] say whose each row is."""
    token = jnp.arange(q.shape[0])
    visible = (request[:, None] == request) & (token[:, None] >= token) & valid
    if sliding_window is not None:
        visible &= token > token[:, None] - sliding_window
    # Padding tokens see themselves, so that their rows are finite.
    visible |= token[:, None] == token
    return jax.nn.dot_product_attention(q[None], k[None], v[None], mask=visible[None, None], scale=scale)[0]


def _sharded_paged_attention(
    kv_cache: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None,
) -> tuple[jax.Array, jax.Array]:
    """The paged kernel on each device's own heads.

    With fewer kv heads than devices the cache holds each head as often as there are devices that need it, so that
    each device keeps only the head its queries use.
    """
    kernel = functools.partial(ragged_paged_attention, scale=scale, sliding_window=sliding_window)
    operands = (
        metadata.input_positions,
        metadata.seq_lens,
        metadata.block_tables,
        metadata.query_start_loc,
        metadata.request_distribution,
    )
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.shape["model"] == 1:
        return kernel(q, k, v, kv_cache, *operands)

    copies = kv_cache.shape[2] // (2 * k.shape[1])
    if copies > 1:
        k, v = jnp.repeat(k, copies, axis=1), jnp.repeat(v, copies, axis=1)
    heads, cache_heads = PartitionSpec(None, "model", None), PartitionSpec(None, None, "model", None)
    return jax.shard_map(
        kernel,
        in_specs=(heads, heads, heads, cache_heads, *([PartitionSpec()] * len(operands))),
        out_specs=(cache_heads, heads),
        check_vma=False,
    )(q, k, v, kv_cache, *operands)
