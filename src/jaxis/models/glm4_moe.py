"""GLM-4.5, 4.6 and 4.7 (MoE): partial rope, dense layers first, then sigmoid-routed experts with a shared one."""

from __future__ import annotations

from jaxis.config.hf_config import HFConfig
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import FeedForward, GatedMLP
from jaxis.layers.moe import SparseMoE
from jaxis.layers.routing import Routing
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM, DecoderOptions


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
        config.ignore("intermediate_size", because="sparse layers do not have it")
        for key in ("moe_intermediate_size", "n_shared_experts"):
            config.ignore(key, because="dense layers do not have it")

    @classmethod
    def options(cls, scope: LayerScope) -> DecoderOptions:
        return DecoderOptions(num_prediction_layers=scope.config.get("num_nextn_predict_layers", 1))


def _feed_forward(scope: LayerScope) -> FeedForward:
    config, mlp = scope.config, scope / "mlp"
    routing = Routing(
        num_experts=config["n_routed_experts"],
        num_experts_per_token=config["num_experts_per_tok"],
        score_function="sigmoid",
        renormalize=config.get("norm_topk_prob", True),
        scaling_factor=config.get("routed_scaling_factor", 1.0),
        num_groups=config.get("n_group", 1),
        num_allowed_groups=config.get("topk_group", 1),
        group_score="top2_sum",
        float32_logits=True,
    )
    if scope.layer_index < config.get("first_k_dense_replace", 1):
        return GatedMLP(mlp)
    expert_size = config["moe_intermediate_size"]
    shared_size = expert_size * config.get("n_shared_experts", 1)
    return SparseMoE(
        mlp,
        routing=routing,
        intermediate_size=expert_size,
        use_selection_bias=True,
        shared_experts=GatedMLP(mlp / "shared_experts", intermediate_size=shared_size) if shared_size else None,
    )
