"""Persimmon 8B: layer norms with biases, also of queries and keys, a squared ReLU, a rope of half a head."""

from __future__ import annotations

from jaxis.config.rope_config import rope_config
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.leaves import layer_norm
from jaxis.layers.mlp import UngatedMLP, activation_function
from jaxis.layers.norm import JaxLayerNorm
from jaxis.layers.qkv_packing import PACKED_BY_GROUP
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family
from jaxis.models.common.layer_norms import biased_layer_norm


class PersimmonDecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config

        def head_norm(_: int, head_dim: int) -> JaxLayerNorm:
            return layer_norm(scope, head_dim, epsilon=config.get("layer_norm_eps", 1e-5))

        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(
                scope / "self_attn",
                num_kv_heads=config["num_attention_heads"],
                rope_settings=rope_config(config, default_partial_rotary_factor=0.5),
                packing=PACKED_BY_GROUP,
                use_bias=True,
                qk_norm=head_norm if config.get("qk_layernorm", True) else False,
            ),
            mlp=UngatedMLP(
                scope / "mlp", activation=activation_function(config.get("hidden_act", "relu2")), use_bias=True
            ),
        )


class PersimmonForCausalLM(CausalLM):
    layer_class = PersimmonDecoderLayer
    make_norm = biased_layer_norm
    renames = (
        ("model.final_layernorm", "model.norm"),
        ("self_attn.query_key_value", "self_attn.qkv_proj"),
        ("self_attn.dense", "self_attn.o_proj"),
        ("self_attn.q_layernorm", "self_attn.q_norm"),
        ("self_attn.k_layernorm", "self_attn.k_norm"),
        ("mlp.dense_h_to_4h", "mlp.up_proj"),
        ("mlp.dense_4h_to_h", "mlp.down_proj"),
    )


FAMILY = Family(
    "Persimmon 8B",
    (PersimmonForCausalLM,),
    "LayerNorm, also on heads of queries and keys; partial RoPE, projections packed head by head, squared ReLU",
)
