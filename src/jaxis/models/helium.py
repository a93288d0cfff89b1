"""Helium 1: the Llama layer with a rope that pairs neighbouring dimensions."""

from __future__ import annotations

from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family


class HeliumDecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(
                scope / "self_attn",
                head_dim=128,
                interleaved_rope=True,
                qkv_bias=config.get("attention_bias", False),
            ),
            mlp=GatedMLP(scope / "mlp", use_bias=config.get("mlp_bias", False)),
        )


class HeliumForCausalLM(CausalLM):
    layer_class = HeliumDecoderLayer


FAMILY = Family("Helium 1", (HeliumForCausalLM,), "interleaved RoPE")
