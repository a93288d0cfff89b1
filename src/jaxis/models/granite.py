"""Granite 3 (dense): the Llama layer with multipliers on embeddings, scores, residuals and logits."""

from __future__ import annotations

from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM, DecoderOptions


class GraniteDecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        use_bias, scale = config.get("attention_bias", False), config.get("attention_multiplier", 1.0)
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(scope / "self_attn", scale=scale, qkv_bias=use_bias, o_bias=use_bias),
            mlp=GatedMLP(scope / "mlp", use_bias=config.get("mlp_bias", False)),
            residual_multiplier=config.get("residual_multiplier", 1.0),
        )


class GraniteForCausalLM(CausalLM):
    layer_class = GraniteDecoderLayer

    @classmethod
    def options(cls, scope: LayerScope) -> DecoderOptions:
        return DecoderOptions(
            embedding_multiplier=scope.config.get("embedding_multiplier", 1.0),
            logits_multiplier=1.0 / scope.config.get("logits_scaling", 1.0),
        )
