"""SmolLM3: the Llama layer, without a rope in every fourth layer."""

from __future__ import annotations

from jaxis.config.layer_types import uniform_span
from jaxis.config.rope_config import rope_config
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family
from jaxis.models.common.no_rope_layers import has_rope


class SmolLM3DecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(
                scope / "self_attn",
                use_rope=has_rope(scope),
                rope_settings=rope_config(scope.config, default_theta=2_000_000.0),
                use_bias=scope.config.get("attention_bias", False),
                span=uniform_span(scope.config, None),
            ),
            mlp=GatedMLP(scope / "mlp", use_bias=scope.config.get("mlp_bias", False)),
        )


class SmolLM3ForCausalLM(CausalLM):
    layer_class = SmolLM3DecoderLayer
    tied_by_default = True
    supported_values = (("use_sliding_window", False),)
    ignored_keys = ((("sliding_window", "max_window_layers"), "only use_sliding_window turns windows on"),)


FAMILY = Family("SmolLM3", (SmolLM3ForCausalLM,), "no RoPE in every fourth layer", gguf=("smollm3",))
