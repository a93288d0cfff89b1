from __future__ import annotations

import jax

from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.config.rope_config import RopeConfig, rope_config
from jaxis.kernels.rotary_embedding import HeadNorms
from jaxis.layers.attention import attention
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.leaves import linear, rms_norm
from jaxis.layers.module import JaxModule, calls_are_observed
from jaxis.layers.rope import make_rotary_embedding
from jaxis.layers.scope import LayerScope
from jaxis.layers.uncached import KVCache


class SharedCacheAttention(JaxModule):
    """Self-attention without keys, values and a cache of its own: it reads those of an earlier layer (Gemma 4).

    The decoder passes that layer's cache, which already holds the step's keys and values. Queries get an RMS norm over
    each head, then the rope.

    Args:
      shares_cache_of: Index of the decoder layer whose keys and values it reads.
      head_dim: D of that layer.
      span: The tokens that a token sees; that layer's span.
      rope_settings: Rope of this layer; None means config.json's settings for all layers.
      scale: Multiplies the scores.
      use_bias: True if the projections have biases.

    Raises:
      ConfigError: config.json's rope is not supported.
    """

    def __init__(
        self,
        scope: LayerScope,
        *,
        shares_cache_of: int,
        head_dim: int,
        rope_settings: RopeConfig | None = None,
        scale: float,
        use_bias: bool = False,
        span: AttentionSpan = FULL_CONTEXT,
    ) -> None:
        config = scope.config
        self.shares_cache_of = shares_cache_of
        self.num_heads: int = config["num_attention_heads"]
        self.head_dim = head_dim
        self.rope = make_rotary_embedding(
            rope_settings or rope_config(config), head_dim=head_dim, max_model_len=scope.max_model_len
        )
        self.scale = scale
        self.span = span
        hidden_size: int = config["hidden_size"]
        size = self.num_heads * head_dim
        self.q_proj = linear(scope / "q_proj", hidden_size, size, axes=("heads", "embed"), use_bias=use_bias)
        self.o_proj = linear(scope / "o_proj", size, hidden_size, axes=("embed", "heads"), use_bias=use_bias)
        self.q_norm = rms_norm(scope, head_dim)

    def __call__(self, kv_cache: KVCache, x: jax.Array, metadata: AttentionMetadata) -> tuple[KVCache, jax.Array]:
        q = self.q_proj(x).reshape(x.shape[0], self.num_heads, self.head_dim)
        norms = None
        if calls_are_observed():
            q = self.q_norm(q)
        else:
            # In one kernel with the rope. There are no keys to norm.
            norms = HeadNorms(self.q_norm.scale, self.q_norm.scale, self.q_norm.epsilon)
        kv_cache, out = attention(
            kv_cache, q, None, None, metadata, rope=self.rope, norms=norms, scale=self.scale, span=self.span
        )
        return kv_cache, self.o_proj(out.reshape(x.shape[0], self.num_heads * self.head_dim))
