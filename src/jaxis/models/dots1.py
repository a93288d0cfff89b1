"""dots.llm1 (arXiv:2506.05767): the Qwen3 layer with DeepSeek V3's experts."""

from __future__ import annotations

from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.config.hf_config import HFConfig
from jaxis.config.layer_types import FULL_ATTENTION, SLIDING_ATTENTION, layer_span, listed_layer_type
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import FeedForward, GatedMLP
from jaxis.layers.moe import ROUTER_BIAS, SparseMoE
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.sparse_layers import ignore_sizes_of_other_layers, is_sparse_layer, sigmoid_routing


class Dots1DecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        use_bias = scope.config.get("attention_bias", False)
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(
                scope / "self_attn", qk_norm=True, qkv_bias=use_bias, o_bias=use_bias, span=_span(scope)
            ),
            mlp=_feed_forward(scope),
        )


class Dots1ForCausalLM(CausalLM):
    layer_class = Dots1DecoderLayer

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        ignore_sizes_of_other_layers(config)
        config.expect("moe_layer_freq", 1)


def _span(scope: LayerScope) -> AttentionSpan:
    """A window, if config.json has one, in the layers that `layer_types` lists, or else from `max_window_layers` on."""
    config = scope.config
    kind = listed_layer_type(config, scope.layer_index, FULL_ATTENTION, SLIDING_ATTENTION)
    if kind is not None:
        return layer_span(config, kind)
    window = config.get_nullable("sliding_window", 4096)
    return AttentionSpan(window) if scope.layer_index >= config.get("max_window_layers", 62) else FULL_CONTEXT


def _feed_forward(scope: LayerScope) -> FeedForward:
    config, mlp = scope.config, scope / "mlp"
    routing = sigmoid_routing(
        config,
        config["n_routed_experts"],
        renormalize=config.get("norm_topk_prob", False),
        scaling_factor=config.get("routed_scaling_factor", 1.0),
    )
    if not is_sparse_layer(scope, default_first_sparse=0):
        return GatedMLP(mlp)
    expert_size = config["moe_intermediate_size"]
    shared = GatedMLP(mlp / "shared_experts", intermediate_size=expert_size * config["n_shared_experts"])
    return SparseMoE(
        mlp,
        routing=routing,
        intermediate_size=expert_size,
        selection_bias_name=ROUTER_BIAS,
        shared_experts=shared,
    )
