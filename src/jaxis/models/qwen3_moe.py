"""Qwen3 MoE: the Qwen3 layer with a mixture of experts in place of most feed-forward blocks."""

from __future__ import annotations

from jaxis.config.hf_config import HFConfig
from jaxis.config.layer_types import uniform_span
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import FeedForward, GatedMLP
from jaxis.layers.moe import SparseMoE
from jaxis.layers.routing import Routing
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM


class Qwen3MoeDecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        use_bias = config.get("attention_bias", False)
        window = config.get("sliding_window", 4096) if config.get("use_sliding_window", False) else None
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(
                scope / "self_attn",
                qk_norm=True,
                qkv_bias=use_bias,
                o_bias=use_bias,
                span=uniform_span(config, window),
            ),
            mlp=_feed_forward(scope),
        )


class Qwen3MoeForCausalLM(CausalLM):
    layer_class = Qwen3MoeDecoderLayer

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        config.expect("use_qk_norm", True)
        config.ignore("max_window_layers", because="the reference has the window in all layers or in none")
        config.ignore("sliding_window", because="only use_sliding_window turns it on")
        config.ignore("intermediate_size", because="sparse layers do not have it")
        config.ignore("moe_intermediate_size", because="dense layers do not have it")


def _feed_forward(scope: LayerScope) -> FeedForward:
    config = scope.config
    routing = Routing(
        # The second name is transformers 5's.
        num_experts=config["num_experts" if "num_experts" in config else "num_local_experts"],
        num_experts_per_token=config["num_experts_per_tok"],
        renormalize=config.get("norm_topk_prob", False),
    )
    is_listed_as_dense = scope.layer_index in config.get("mlp_only_layers", [])
    if is_listed_as_dense or (scope.layer_index + 1) % config.get("decoder_sparse_step", 1):
        return GatedMLP(scope / "mlp")
    return SparseMoE(scope / "mlp", routing=routing, intermediate_size=config["moe_intermediate_size"])
