"""Phi-1, Phi-1.5 and Phi-2 (arXiv:2309.05463): parallel attention and MLP, biases everywhere, the head's too."""

from __future__ import annotations

from jaxis.config.rope_config import rope_config
from jaxis.layers.decoder_layer import ParallelDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import UngatedMLP, activation_function
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM, DecoderOptions
from jaxis.models.common.family import Family
from jaxis.models.common.layer_norms import biased_layer_norm


class PhiDecoderLayer(ParallelDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(
                scope / "self_attn",
                rope_settings=rope_config(scope.config, default_partial_rotary_factor=0.5),
                use_bias=True,
            ),
            mlp=UngatedMLP(
                scope / "mlp",
                activation=activation_function(scope.config.get("hidden_act", "gelu_new")),
                use_bias=True,
            ),
        )


class PhiForCausalLM(CausalLM):
    layer_class = PhiDecoderLayer
    make_norm = biased_layer_norm
    renames = (
        ("model.final_layernorm", "model.norm"),
        ("self_attn.dense", "self_attn.o_proj"),
        ("mlp.fc1", "mlp.up_proj"),
        ("mlp.fc2", "mlp.down_proj"),
    )
    supported_values = (("qk_layernorm", False),)

    @classmethod
    def options(cls, scope: LayerScope) -> DecoderOptions:
        del scope
        return DecoderOptions(head_bias=True)


FAMILY = Family(
    "Phi-1, Phi-1.5, Phi-2",
    (PhiForCausalLM,),
    "parallel attention and feed-forward, LayerNorm, partial RoPE, biases, a head with a bias",
    gguf=("phi2",),
)
