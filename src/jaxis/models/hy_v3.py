"""Hy3: the Qwen3 layer with sigmoid-routed experts and a shared one."""

from __future__ import annotations

from jaxis.config.hf_config import HFConfig
from jaxis.config.rope_config import rope_config
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family
from jaxis.models.common.sparse_layers import (
    dense_or_sparse,
    is_sparse_layer,
    sigmoid_routing,
)


class HYV3DecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        routing = sigmoid_routing(config, renormalize=True, scaling_factor=config.get("router_scaling_factor", 2.826))
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(
                scope / "self_attn",
                head_dim=128,
                rope_settings=rope_config(config, default_theta=11_158_840.0),
                qk_norm=True,
                use_bias=config.get("attention_bias", False),
            ),
            mlp=dense_or_sparse(
                scope,
                routing,
                is_sparse=is_sparse_layer(scope.config, scope.layer_index, default_first_sparse=1),
                num_shared_experts=config.get("num_shared_experts", 1),
                use_bias=config.get("mlp_bias", False),
            ),
        )


class HYV3ForCausalLM(CausalLM):
    layer_class = HYV3DecoderLayer
    default_prediction_layers = 1
    renames = (
        ("mlp.router.gate", "mlp.gate"),
        ("mlp.expert_bias", "mlp.gate.e_score_correction_bias"),
        ("mlp.shared_mlp", "mlp.shared_experts"),
    )
    module_renames = ()  # transformers has the names that are used here

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        config.expect_all(qk_norm=True, route_norm=True, moe_router_use_sigmoid=True)
        config.expect_all(moe_router_enable_expert_bias=True, expert_hidden_dim=config["moe_intermediate_size"])
        for key in ("enable_attention_fp32_softmax", "enable_lm_head_fp32", "enable_moe_fp32_combine"):
            config.ignore(key, because="softmax, logits and the sum of two outputs are rounded once anyway")
        config.ignore("use_grouped_mm", because="it is how the same result is computed")


FAMILY = Family(
    "Hy3",
    (HYV3ForCausalLM,),
    "norms on heads, 192 experts by sigmoid with a selection bias, a shared expert",
    gguf=("hy_v3",),
)
