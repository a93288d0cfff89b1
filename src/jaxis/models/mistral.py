"""Mistral: the Llama layer, with a sliding window in all layers if config.json has one."""

from __future__ import annotations

from jaxis.config.layer_types import uniform_span
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM


class MistralDecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        # A config.json without the key means the first release, whose window is 4096; null means none.
        span = uniform_span(scope.config, scope.config.get_nullable("sliding_window", 4096))
        super().__init__(
            scope, self_attn=GroupedQueryAttention(scope / "self_attn", span=span), mlp=GatedMLP(scope / "mlp")
        )


class MistralForCausalLM(CausalLM):
    layer_class = MistralDecoderLayer
