"""Apertus: the Llama layer with norms on heads and a feed-forward block without a gate, activated by xIELU."""

from __future__ import annotations

from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import UngatedMLP
from jaxis.layers.scope import LayerScope
from jaxis.layers.xielu import XIELU
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family


class ApertusDecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        use_bias = scope.config.get("attention_bias", False)
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(scope / "self_attn", qk_norm=True, use_bias=use_bias),
            mlp=UngatedMLP(scope / "mlp", activation=XIELU(scope)),
        )


class ApertusForCausalLM(CausalLM):
    layer_class = ApertusDecoderLayer
    renames = (
        ("attention_layernorm", "input_layernorm"),
        ("feedforward_layernorm", "post_attention_layernorm"),
    )
    supported_values = (("hidden_act", "xielu"), ("mlp_bias", False), ("qk_norm", True), ("post_norm", False))


FAMILY = Family(
    "Apertus",
    (ApertusForCausalLM,),
    "a feed-forward block without a gate, whose activation has learnt slopes (xIELU); norms on heads",
    gguf=("apertus",),
)
