"""Jais 2: the Llama layer with layer norms, biases throughout, and squared ReLU without a gate."""

from __future__ import annotations

from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import UngatedMLP, activation_function
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family, PlainGGUF
from jaxis.models.common.layer_norms import biased_layer_norm


class Jais2DecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(scope / "self_attn", use_bias=config.get("attention_bias", True)),
            mlp=UngatedMLP(
                scope / "mlp",
                activation=activation_function(config.get("hidden_act", "relu2")),
                use_bias=config.get("mlp_bias", True),
            ),
        )


class Jais2ForCausalLM(CausalLM):
    layer_class = Jais2DecoderLayer
    make_norm = biased_layer_norm


FAMILY = Family(
    "Jais 2",
    (Jais2ForCausalLM,),
    "LayerNorm, squared ReLU without a gate, biases everywhere",
    gguf=(
        PlainGGUF(
            "jais2",
            switches={"attention_bias": ["attn_q.bias"], "mlp_bias": ["ffn_up.bias"]},
            has_layer_norms=True,
        ),
    ),
)
