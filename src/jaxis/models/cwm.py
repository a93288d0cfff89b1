"""Code World Model (arXiv:2510.02387): the Llama layer with a window in three of four layers."""

from __future__ import annotations

from jaxis.config.layer_types import FULL_ATTENTION, SLIDING_ATTENTION, layer_span, listed_layer_type
from jaxis.config.rope_config import rope_config
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family


class CwmDecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config, index = scope.config, scope.layer_index
        kind = listed_layer_type(config, index, FULL_ATTENTION, SLIDING_ATTENTION)
        if kind is None:
            kind = SLIDING_ATTENTION if index % 4 else FULL_ATTENTION
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(
                scope / "self_attn",
                head_dim=128,
                rope_settings=rope_config(config, default_theta=1_000_000.0),
                span=layer_span(config, kind, default_window=8192),
            ),
            mlp=GatedMLP(scope / "mlp", use_bias=config.get("mlp_bias", False)),
        )


class CwmForCausalLM(CausalLM):
    layer_class = CwmDecoderLayer


FAMILY = Family("Code World Model", (CwmForCausalLM,), "a window of 8192 in three of four layers, llama3 RoPE scaling")
