"""GLM-4.5, 4.6 and 4.7 (MoE): partial rope, dense layers first, then sigmoid-routed experts with a shared one."""

from __future__ import annotations

from jaxis.config.hf_config import HFConfig
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import FeedForward, GatedMLP
from jaxis.layers.moe import ROUTER_BIAS, SparseMoE
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM, DecoderOptions
from jaxis.models.common.sparse_layers import ignore_sizes_of_other_layers, sigmoid_routing


class Glm4MoeDecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        use_bias, qk_norm = scope.config.get("attention_bias", False), scope.config.get("use_qk_norm", False)
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(scope / "self_attn", qkv_bias=use_bias, qk_norm=qk_norm),
            mlp=_feed_forward(scope),
        )


class Glm4MoeForCausalLM(CausalLM):
    layer_class = Glm4MoeDecoderLayer

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        ignore_sizes_of_other_layers(config)

    @classmethod
    def options(cls, scope: LayerScope) -> DecoderOptions:
        return DecoderOptions(num_prediction_layers=scope.config.get("num_nextn_predict_layers", 1))


def _feed_forward(scope: LayerScope) -> FeedForward:
    config, mlp = scope.config, scope / "mlp"
    routing = sigmoid_routing(
        config,
        config["n_routed_experts"],
        renormalize=config.get("norm_topk_prob", True),
        scaling_factor=config.get("routed_scaling_factor", 1.0),
    )
    if scope.layer_index < config.get("first_k_dense_replace", 1):
        return GatedMLP(mlp)
    expert_size = config["moe_intermediate_size"]
    shared_size = expert_size * config.get("n_shared_experts", 1)
    return SparseMoE(
        mlp,
        routing=routing,
        intermediate_size=expert_size,
        selection_bias_name=ROUTER_BIAS,
        shared_experts=GatedMLP(mlp / "shared_experts", intermediate_size=shared_size) if shared_size else None,
    )
