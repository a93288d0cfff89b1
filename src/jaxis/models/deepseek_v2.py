"""DeepSeek V2 and V2 Lite: latent attention, a mixture of experts in all layers but the first few."""

from __future__ import annotations

from jaxis.config.hf_config import HFConfig
from jaxis.layers.routing import Routing
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.deepseek import DeepseekDecoderLayer
from jaxis.models.common.family import Family
from jaxis.models.common.sparse_layers import num_dense_layers


class DeepseekV2DecoderLayer(DeepseekDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        super().__init__(
            scope,
            routing=_routing(config),
            is_sparse=scope.layer_index >= num_dense_layers(config),
            mlp_bias=config.get("mlp_bias", False),
        )


class DeepseekV2ForCausalLM(CausalLM):
    layer_class = DeepseekV2DecoderLayer

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        config.expect_all(moe_layer_freq=1, scoring_func="softmax")
        config.expect("topk_method", "greedy", "group_limited_greedy")
        # The reference treats it as false whatever its value; the publisher's own code does not.
        config.expect("norm_topk_prob", False)


def _routing(config: HFConfig) -> Routing:
    """Routing by softmax scores without renormalisation; the best experts of all or of the best groups."""
    has_groups = config.get("topk_method", "greedy") == "group_limited_greedy"
    if not has_groups:
        config.ignore("n_group", "topk_group", because="topk_method='greedy' chooses from all experts")
    return Routing(
        num_experts=config["n_routed_experts"],
        num_experts_per_token=config["num_experts_per_tok"],
        scaling_factor=config.get("routed_scaling_factor", 1.0),
        num_groups=config.get("n_group", 1) if has_groups else 1,
        num_allowed_groups=config.get("topk_group", 1) if has_groups else 1,
        group_score="max",
        float32_logits=True,
    )


FAMILY = Family(
    "DeepSeek V2, V2 Lite",
    (DeepseekV2ForCausalLM,),
    "latent attention; experts in groups, softmax",
    gguf=("deepseek2",),
)
