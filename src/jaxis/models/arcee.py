"""Arcee AFM: the Llama layer with a feed-forward block without a gate, whose activation is a squared ReLU."""

from __future__ import annotations

from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import UngatedMLP, activation_function
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family, PlainGGUF


class ArceeDecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(scope / "self_attn", use_bias=config.get("attention_bias", False)),
            mlp=UngatedMLP(
                scope / "mlp",
                activation=activation_function(config.get("hidden_act", "relu2")),
                use_bias=config.get("mlp_bias", False),
            ),
        )


class ArceeForCausalLM(CausalLM):
    layer_class = ArceeDecoderLayer


FAMILY = Family(
    "Arcee AFM-4.5B",
    (ArceeForCausalLM,),
    "a feed-forward block without a gate, squared ReLU",
    gguf=(
        PlainGGUF(
            "arcee",
            switches={"attention_bias": ["attn_q.bias"], "mlp_bias": ["ffn_up.bias"]},
            constants={"hidden_act": "relu2"},
            permutes_rope=True,
        ),
    ),
)
