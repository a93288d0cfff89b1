"""Ling 2.0 and Ring 2.0, and Sarvam 30B: GLM-4.5's layer with packed projections and DeepSeek V3's routing."""

from __future__ import annotations

from jaxis.config.hf_config import HFConfig
from jaxis.config.rope_config import rope_config
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.qkv_packing import PACKED
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM, DecoderOptions
from jaxis.models.common.family import Family
from jaxis.models.common.prediction_layers import num_prediction_layers
from jaxis.models.common.sparse_layers import (
    dense_or_sparse,
    ignore_sizes_of_other_layers,
    num_dense_layers,
    usual_sigmoid_routing,
)


class BailingMoeV2DecoderLayer(PreNormDecoderLayer):
    """A decoder layer; `default_theta` is the base of the rope if config.json has none."""

    def __init__(self, scope: LayerScope, *, default_theta: float = 600_000.0) -> None:
        config = scope.config
        routing = usual_sigmoid_routing(config, config["num_experts"], default_factor=2.5)
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(
                scope / "self_attn",
                rope_settings=rope_config(config, default_theta=default_theta),
                packing=PACKED,
                qkv_bias=config.get("use_qkv_bias", False),
                qk_norm=config.get("use_qk_norm", True),
            ),
            mlp=dense_or_sparse(
                scope,
                routing,
                is_sparse=scope.layer_index >= num_dense_layers(config, 1),
                num_shared_experts=config.get("num_shared_experts", 1),
            ),
        )


class BailingMoeV2ForCausalLM(CausalLM):
    layer_class = BailingMoeV2DecoderLayer
    renames = (
        ("model.word_embeddings", "model.embed_tokens"),
        ("attention.query_key_value", "self_attn.qkv_proj"),
        ("attention.dense", "self_attn.o_proj"),
        ("attention.query_layernorm", "self_attn.q_norm"),
        ("attention.key_layernorm", "self_attn.k_norm"),
        ("mlp.gate.expert_bias", "mlp.gate.e_score_correction_bias"),
    )

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        ignore_sizes_of_other_layers(config)
        config.expect("hidden_act", "silu")
        config.expect("moe_shared_expert_intermediate_size", config.get("moe_intermediate_size"))
        config.expect("score_function", "sigmoid")
        config.expect("router_dtype", "fp32")
        config.expect("moe_router_enable_expert_bias", True)
        config.expect("use_rmsnorm", True)
        for key in ("use_bias", "norm_head", "norm_softmax", "use_sliding_window"):
            config.expect(key, False)
        config.expect("rotary_dim", int(config.get("partial_rotary_factor", 1.0) * config["head_dim"]))
        config.ignore("num_mtp_layers", because="layers that draft tokens are not loaded")

    @classmethod
    def options(cls, scope: LayerScope) -> DecoderOptions:
        return DecoderOptions(num_prediction_layers=num_prediction_layers(scope.config))


FAMILY = Family(
    "Ling 2.0 mini, flash, 1T; Ring 2.0; Sarvam 30B",
    (BailingMoeV2ForCausalLM,),
    "norms on heads, packed projections, partial RoPE, DeepSeek V3's routing",
    gguf=("bailingmoe2",),
    other_names={"SarvamMoEForCausalLM": BailingMoeV2ForCausalLM},
)
