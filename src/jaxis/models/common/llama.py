"""The decoder layer of Llama and of models whose text is a Llama."""

from __future__ import annotations

from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.scope import LayerScope


class LlamaDecoderLayer(PreNormDecoderLayer):
    """Grouped-query attention and a gated block, each after an RMS norm."""

    def __init__(self, scope: LayerScope) -> None:
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(scope / "self_attn", use_bias=scope.config.get("attention_bias", False)),
            mlp=GatedMLP(scope / "mlp", use_bias=scope.config.get("mlp_bias", False)),
        )
