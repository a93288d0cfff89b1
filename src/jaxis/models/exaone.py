"""EXAONE 3 and 3.5 (arXiv:2412.04862): Llama under other names."""

from __future__ import annotations

from jaxis.config.rope_config import rope_config
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family


class ExaoneDecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        rope, use_bias = rope_config(config, default_theta=500_000.0), config.get("attention_bias", False)
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(scope / "self_attn", rope_settings=rope, use_bias=use_bias),
            mlp=GatedMLP(scope / "mlp", use_bias=config.get("mlp_bias", False)),
        )


class ExaoneForCausalLM(CausalLM):
    layer_class = ExaoneDecoderLayer
    renames = (
        ("transformer.wte", "model.embed_tokens"),
        ("transformer.h", "model.layers"),
        ("transformer.ln_f", "model.norm"),
        ("ln_1", "input_layernorm"),
        ("ln_2", "post_attention_layernorm"),
        ("attn.attention", "self_attn"),
        ("self_attn.out_proj", "self_attn.o_proj"),
        ("mlp.c_fc_0", "mlp.gate_proj"),
        ("mlp.c_fc_1", "mlp.up_proj"),
        ("mlp.c_proj", "mlp.down_proj"),
    )
    buffers = ("rotary.inv_freq",)


FAMILY = Family(
    "EXAONE 3, 3.5, Deep",
    (ExaoneForCausalLM,),
    "Llama under other names",
    gguf=("exaone",),
    names={
        "exaone": {
            "num_layers": "num_hidden_layers",
            "layer_norm_epsilon": "rms_norm_eps",
            "activation_function": "hidden_act",
        }
    },
)
