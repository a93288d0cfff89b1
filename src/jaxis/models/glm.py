"""GLM-4-9B (2024): the Llama layer with a rope that pairs neighbours of half a head, and packed gate and up."""

from __future__ import annotations

from jaxis.config.rope_config import rope_config
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family


class GlmDecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(
                scope / "self_attn",
                head_dim=128,
                rope_settings=rope_config(scope.config, default_partial_rotary_factor=0.5),
                interleaved_rope=True,
                qkv_bias=scope.config.get("attention_bias", True),
            ),
            mlp=GatedMLP(scope / "mlp", packed_gate_up=True),
        )


class GlmForCausalLM(CausalLM):
    layer_class = GlmDecoderLayer


FAMILY = Family(
    "GLM-4 9B, GLM-Edge",
    (GlmForCausalLM,),
    "interleaved partial RoPE, packed gate and up projections, biases",
    gguf=("chatglm",),
)
