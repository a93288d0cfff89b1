from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxis.errors import ConfigError
from jaxis.kernels.paged_cache import PagedCache
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.indexer import Indexer, IndexerSizes
from jaxis.layers.leaves import layer_norm
from jaxis.layers.mla import LatentAttention, LatentAttentionSizes, LatentCacheSpec
from jaxis.layers.module import JaxModule
from jaxis.layers.query_scale import LogQueryScale
from jaxis.layers.rope import RotaryEmbedding, ScaledRotaryEmbedding
from jaxis.layers.scope import LayerScope


class LatentCache(JaxModule):
    """Cache of latents: a module of its own, since a layer that reads an earlier layer's has none."""

    def __init__(self, kv_cache_spec: LatentCacheSpec) -> None:
        self.kv_cache_spec = kv_cache_spec


class LogScaledIndexer(Indexer):
    """An indexer whose queries are projected from the normed hidden state, and scaled by position."""

    def __init__(self, scope: LayerScope, sizes: IndexerSizes, *, rope: RotaryEmbedding | None) -> None:
        size: int = scope.config["hidden_size"]
        super().__init__(scope, sizes, query_size=size, rope=rope)
        self.q_input_norm = layer_norm(scope, epsilon=1e-6)
        self.query_scale = LogQueryScale(scope, sizes.num_heads)

    def queries(self, query_input: jax.Array, metadata: AttentionMetadata) -> jax.Array:
        q = super().queries(self.q_input_norm(query_input), metadata)
        return self.query_scale(q, metadata.input_positions)


class SharedLatentAttention(LatentAttention):
    """Latent attention to selected tokens, whose latents and cache, and whose selection, may be an earlier layer's.

    The last of its caches is what layers hand on: the last selection, and the latents and rope keys of the step by the
    layer that made them. The frequencies of its rope have learned factors. Queries are scaled by position.

    Args:
      indexer: The layer's indexer; None if it uses another layer's selection.
      num_selected: K, the most tokens that a token attends to.
      rope: The rope without the factors; None for a layer without positions.
      shares_cache_of: Index of the layer whose latents it reads; None for its own.
      handed_on_as: Index of the layer, if later layers read its latents.

    Raises:
      ConfigError: decode_context_parallel_size would divide the context of selected tokens.
    """

    hands_on_selection = True

    def __init__(
        self,
        scope: LayerScope,
        sizes: LatentAttentionSizes,
        *,
        indexer: LogScaledIndexer | None,
        num_selected: int,
        rope: RotaryEmbedding | None,
        scale: float,
        use_bias: bool,
        shares_cache_of: int | None,
        handed_on_as: int | None,
    ) -> None:
        super().__init__(
            scope,
            sizes,
            rope=None,  # applied here
            scale=scale,
            query_scale=LogQueryScale(scope, sizes.num_heads),
            use_bias=use_bias,
            latent_norm_epsilon=scope.config["rms_norm_eps"],
            has_latents=shares_cache_of is None,
        )
        self.unscaled_rope, self.shares_cache_of, self.handed_on_as = rope, shares_cache_of, handed_on_as
        self.serves_short_contexts = scope.max_model_len <= num_selected
        if self.context_devices > 1:
            raise ConfigError(
                f"decode_context_parallel_size={self.context_devices} cannot divide the context of layers that share "
                "latents and selections: use 1"
            )
        # Its name comes before the indexer's: their caches are in this order.
        self.cache = None
        if shares_cache_of is None:
            num_read = None if self.serves_short_contexts else num_selected
            self.cache = LatentCache(LatentCacheSpec(sizes.kv_lora_rank, sizes.qk_rope_head_dim, num_read))
        self.indexer = indexer

    def __call__(
        self, kv_cache: tuple[Any, ...], x: jax.Array, metadata: AttentionMetadata, *factors: jax.Array
    ) -> tuple[tuple[Any, ...], jax.Array]:
        """Returns the updated caches and [T, E] for x [T, E] and the factors of the rope's frequencies."""
        cache, *of_indexer, handed_on = kv_cache
        selection, latents_of = handed_on or (None, {})
        is_paged = isinstance(cache, PagedCache)
        if self.shares_cache_of is None:
            q, latents, rope_key, _ = self._project(x)
        else:
            q = self.q_proj(x).reshape(x.shape[0], self.sizes.num_heads, self.sizes.qk_head_dim)
            latents, rope_key = latents_of[self.shares_cache_of]
        if self.handed_on_as is not None:
            latents_of = {**latents_of, self.handed_on_as: (latents, rope_key)}
        rope = None
        if (unscaled := self.unscaled_rope) is not None:
            rope = ScaledRotaryEmbedding(
                unscaled.inv_freq, unscaled.attention_scaling, unscaled.interleaved, factors=factors[0]
            )
            q_nope, q_rope = jnp.split(q, [self.sizes.qk_nope_head_dim], axis=-1)
            q_rope, rope_key = rope(q_rope, rope_key, metadata.input_positions)
            q = jnp.concatenate([q_nope, q_rope], axis=-1)
        if self.serves_short_contexts and is_paged:
            selection = None
        elif self.indexer is not None:
            own, selection = self.indexer(tuple(of_indexer) if is_paged else (), x, x, metadata, rope)
            of_indexer = list(own) if is_paged else of_indexer
        # A layer that shares a cache writes the same entries there again.
        updated, out = self._attend(cache if is_paged else None, q, latents, rope_key, metadata, selection=selection)
        return (updated if is_paged else cache, *of_indexer, (selection, latents_of)), out
