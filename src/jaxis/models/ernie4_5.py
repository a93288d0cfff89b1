"""ERNIE 4.5 (dense): the Llama layer with a rope that pairs neighbours."""

from __future__ import annotations

from jaxis.config.rope_config import rope_config
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM, DecoderOptions
from jaxis.models.common.family import Family


class Ernie4_5DecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        use_bias = scope.config.get("use_bias", False)
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(
                scope / "self_attn",
                head_dim=128,
                rope_settings=rope_config(scope.config, default_theta=500_000.0),
                interleaved_rope=True,
                qkv_bias=use_bias,
                o_bias=use_bias,
            ),
            mlp=GatedMLP(scope / "mlp", use_bias=use_bias),
        )


class Ernie4_5ForCausalLM(CausalLM):
    layer_class = Ernie4_5DecoderLayer

    @classmethod
    def options(cls, scope: LayerScope) -> DecoderOptions:
        del scope
        return DecoderOptions(tied_by_default=True)


FAMILY = Family(
    "ERNIE 4.5 (dense)",
    (Ernie4_5ForCausalLM,),
    "interleaved RoPE",
    other_names={"Ernie4_5_ForCausalLM": Ernie4_5ForCausalLM},
)
