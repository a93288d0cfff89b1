"""GLM-4-0414 (dense): norms before and after each block, a rope that pairs neighbours of half a head."""

from __future__ import annotations

import jax

from jaxis.config.rope_config import rope_config
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.decoder_layer import LayerCache, LayerOutput
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.leaves import rms_norm
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.module import JaxModule
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family


class Glm4DecoderLayer(JaxModule):
    """`x = x + norm(self_attn(norm(x)))`
    `x = x + norm(mlp(norm(x)))`

    The norms' names are specific to the family: `post_attention_layernorm` is the one before the feed-forward block.
    """

    def __init__(self, scope: LayerScope) -> None:
        self.input_layernorm = rms_norm(scope)
        self.self_attn = GroupedQueryAttention(
            scope / "self_attn",
            head_dim=128,
            rope_settings=rope_config(scope.config, default_partial_rotary_factor=0.5),
            interleaved_rope=True,
            qkv_bias=scope.config.get("attention_bias", True),
        )
        self.post_self_attn_layernorm = rms_norm(scope)
        self.post_attention_layernorm = rms_norm(scope)
        self.mlp = GatedMLP(scope / "mlp", packed_gate_up=True)
        self.post_mlp_layernorm = rms_norm(scope)

    def __call__(self, kv_cache: LayerCache, x: jax.Array, metadata: AttentionMetadata) -> LayerOutput:
        """x [T, E] -> the updated cache (None without one) and [T, E]."""
        kv_cache, attended = self.self_attn(kv_cache, self.input_layernorm(x), metadata)
        x = x + self.post_self_attn_layernorm(attended)
        return kv_cache, x + self.post_mlp_layernorm(self.mlp(self.post_attention_layernorm(x)))


class Glm4ForCausalLM(CausalLM):
    layer_class = Glm4DecoderLayer


FAMILY = Family(
    "GLM-4 (0414)",
    (Glm4ForCausalLM,),
    "norms before and after, interleaved partial RoPE, packed gate and up projections",
    gguf=("glm4",),
)
