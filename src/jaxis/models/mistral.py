"""Mistral and Ministral 8B: the Llama layer with a sliding window, in all layers or in those of `layer_types`."""

from __future__ import annotations

from jaxis.config.layer_types import FULL_ATTENTION, SLIDING_ATTENTION, layer_span, listed_layer_type
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family
from jaxis.models.common.mistral import MistralDecoderLayer


class MistralForCausalLM(CausalLM):
    layer_class = MistralDecoderLayer


class MinistralDecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        kind = listed_layer_type(config, scope.layer_index, FULL_ATTENTION, SLIDING_ATTENTION)
        if kind is None:
            kind = FULL_ATTENTION if config.get("sliding_window", 4096) is None else SLIDING_ATTENTION
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(scope / "self_attn", span=layer_span(config, kind, default_window=4096)),
            mlp=GatedMLP(scope / "mlp"),
        )


class MinistralForCausalLM(CausalLM):
    layer_class = MinistralDecoderLayer


FAMILY = Family("Mistral", (MistralForCausalLM,), "sliding window", gguf=("llama",))

MINISTRAL_FAMILY = Family("Ministral 8B (2410)", (MinistralForCausalLM,), "a window in three of four layers")
