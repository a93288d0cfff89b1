"""Code shared by families with GLM-4's order and names of norms."""

from __future__ import annotations

import jax

from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.decoder_layer import LayerCache, LayerOutput, SelfAttention
from jaxis.layers.leaves import rms_norm
from jaxis.layers.mlp import FeedForward
from jaxis.layers.module import JaxModule
from jaxis.layers.scope import LayerScope


class GlmSandwichDecoderLayer(JaxModule):
    """`x = x + norm(self_attn(norm(x)))`
    `x = x + norm(mlp(norm(x)))`

    GLM's names differ: `post_attention_layernorm` comes before the feed-forward block.
    """

    def __init__(self, scope: LayerScope, *, self_attn: SelfAttention, mlp: FeedForward) -> None:
        self.input_layernorm = rms_norm(scope)
        self.self_attn = self_attn
        self.post_self_attn_layernorm = rms_norm(scope)
        self.post_attention_layernorm = rms_norm(scope)
        self.mlp = mlp
        self.post_mlp_layernorm = rms_norm(scope)

    def __call__(self, kv_cache: LayerCache, x: jax.Array, metadata: AttentionMetadata) -> LayerOutput:
        kv_cache, attended = self.self_attn(kv_cache, self.input_layernorm(x), metadata)
        x = x + self.post_self_attn_layernorm(attended)
        return kv_cache, x + self.post_mlp_layernorm(self.mlp(self.post_attention_layernorm(x), metadata))
