"""Attention of blocks of tokens that are drafted together to a context, and within each block in both directions."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxis.config.attention_span import AttentionSpan
from jaxis.kernels.ragged_paged_attention import num_cached_heads
from jaxis.layers.attention import apply_rope, attention
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.linear import apply_together
from jaxis.layers.scope import LayerScope
from jaxis.layers.uncached import KVCache, is_cache

# What a token sees whose attention nobody uses: itself.
_OWN_TOKEN = AttentionSpan(sliding_window=1)


class BlockAttention(GroupedQueryAttention):
    """Attention of a block drafter (DFlash, arXiv:2602.06036), with a norm of each query and key head.

    Its context is not a sequence of its own inputs: `write_context` makes its keys and values of another model's
    states. Each block of n tokens then sees the context before it, and all of itself or, if `is_causal`, of itself what
    comes first. The block's keys and values lie behind the context in the cache, until the next context replaces them.

    Args:
      scope: The layer's scope.
      is_causal: Whether a token sees nothing that comes after it.
      options: See `GroupedQueryAttention`.

    Raises:
      ConfigError: See `GroupedQueryAttention`.
    """

    def __init__(self, scope: LayerScope, *, is_causal: bool, **options: Any) -> None:
        super().__init__(scope, qk_norm=True, **options)
        self.is_causal = is_causal

    def write_context(self, kv_cache: KVCache, context: jax.Array, metadata: AttentionMetadata) -> KVCache:
        """Writes keys and values of a step's tokens into the cache.

        Args:
          kv_cache: The layer's.
          context: [T, E], the tokens' projected states.
          metadata: Of the tokens.
        """
        assert self.v_proj is not None
        assert self.k_norm is not None
        k, v = map(self._in_heads, apply_together(context, self.k_proj, self.v_proj))
        # In the place of queries; there are no others.
        k, _ = apply_rope(self.rope, self.k_norm(k), k[:, :0], metadata, is_paged=True)
        return self._write(kv_cache, k, v, metadata)

    def __call__(self, kv_cache: KVCache, x: jax.Array, metadata: AttentionMetadata) -> tuple[KVCache, jax.Array]:
        """Attention of R blocks of n tokens each.

        Args:
          kv_cache: The layer's, with each block's context.
          x: [R * n, E].
          metadata: Of the blocks, as of R requests that compute their last n tokens.

        Returns:
          The updated cache and [R * n, E].
        """
        q, k, v = map(self._in_heads, self._project(x))
        q, k = apply_rope(self.rope, *self._normed(q, k), metadata, is_paged=True)
        if self.is_causal:
            kv_cache, out = attention(kv_cache, q, k, v, metadata, rope=None, scale=self.scale, span=self.span)
        else:
            kv_cache = self._write(kv_cache, k, v, metadata)
            kv_cache, out = self._attend_in_both_directions(kv_cache, q, metadata)
        return kv_cache, self.o_proj(out.reshape(x.shape[0], -1))

    def _in_heads(self, projected: jax.Array) -> jax.Array:
        """[T, heads * D] -> [T, heads, D]; heads of keys and values are with the copies that `after_loading` made."""
        return projected.reshape(projected.shape[0], -1, self.head_dim)

    def _write(self, kv_cache: KVCache, k: jax.Array, v: jax.Array, metadata: AttentionMetadata) -> KVCache:
        """Puts keys and values [T, K, D] into the cache: the kernel that does it attends, here to single tokens."""
        q = jnp.zeros((k.shape[0], self.num_heads, self.head_dim), k.dtype)
        metadata = self._with_one_table(metadata)
        return attention(kv_cache, q, k, v, metadata, rope=None, scale=self.scale, span=_OWN_TOKEN)[0]

    def _attend_in_both_directions(
        self, kv_cache: KVCache, q: jax.Array, metadata: AttentionMetadata
    ) -> tuple[KVCache, jax.Array]:
        """Queries [R * n, H, D] that see what is in the cache up to their block's end; the cache and [R * n, H, D].

        The kernels let a request's last token see all of it, so here every block is one token. Where all see the same,
        its n queries are further heads of the groups that share key-value heads, and the context is read once.
        Otherwise the first sees one token more than the second, and so on.
        """
        if not is_cache(kv_cache):
            raise ValueError("a block's context is in a cache")
        num_blocks, num_kv_heads = metadata.seq_lens.shape[0], num_cached_heads(kv_cache)
        number = metadata.request_distribution[2]
        last_tokens = dataclasses.replace(
            self._with_one_table(metadata),
            input_positions=metadata.seq_lens - 1,
            query_start_loc=jnp.minimum(jnp.arange(num_blocks + 1, dtype=jnp.int32), number),
            request_distribution=jnp.stack([number, number, number]),
        )
        attend = functools.partial(attention, k=None, v=None, metadata=last_tokens, rope=None, scale=self.scale)
        of_blocks = q.reshape(num_blocks, -1, self.num_heads, self.head_dim)
        length = of_blocks.shape[1]
        if self.span.sliding_window is not None:
            outputs = []
            for i in range(length):
                span = AttentionSpan(self.span.sliding_window + length - 1 - i)
                kv_cache, out = attend(kv_cache, of_blocks[:, i], span=span)
                outputs.append(out)
            return kv_cache, jnp.stack(outputs, axis=1).reshape(q.shape)
        groups = of_blocks.reshape(num_blocks, length, num_kv_heads, -1, self.head_dim).transpose(0, 2, 1, 3, 4)
        kv_cache, out = attend(kv_cache, groups.reshape(num_blocks, -1, self.head_dim), span=self.span)
        return kv_cache, out.reshape(groups.shape).transpose(0, 2, 1, 3, 4).reshape(q.shape)

    def _with_one_table(self, metadata: AttentionMetadata) -> AttentionMetadata:
        """The metadata with this layer's block table alone, for whatever span."""
        table = metadata.block_tables_for(self.span)
        return dataclasses.replace(metadata, block_tables=table, spans=(), other_block_tables=())
