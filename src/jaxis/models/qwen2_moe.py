"""Qwen1.5 and Qwen2 MoE: the Qwen2 layer with a mixture of experts, and a shared expert behind a gate of its own."""

from __future__ import annotations

from jaxis.config.layer_types import uniform_span
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family
from jaxis.models.common.qwen import QWEN_MOE_RENAMES, qwen_feed_forward


class Qwen2MoeDecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(
                scope / "self_attn", qkv_bias=config.get("qkv_bias", True), span=uniform_span(config, None)
            ),
            mlp=qwen_feed_forward(
                scope,
                renormalize=config.get("norm_topk_prob", False),
                shared_size=config["shared_expert_intermediate_size"],
            ),
        )


class Qwen2MoeForCausalLM(CausalLM):
    layer_class = Qwen2MoeDecoderLayer
    router_aux_loss_coef = 0.001
    renames = QWEN_MOE_RENAMES
    supported_values = (("use_sliding_window", False),)
    ignored_keys = (
        ("sliding_window", "only use_sliding_window turns it on"),
        ("intermediate_size", "sparse layers do not have it"),
    )


FAMILY = Family(
    "Qwen1.5 MoE, Qwen2 MoE",
    (Qwen2MoeForCausalLM,),
    "biases on queries, keys and values; a shared expert behind a gate",
    gguf=("qwen2moe",),
)
