"""dots.llm1 (arXiv:2506.05767): the Qwen3 layer with DeepSeek V3's experts."""

from __future__ import annotations

from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.config.layer_types import FULL_ATTENTION, SLIDING_ATTENTION, layer_span, listed_layer_type
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


class Dots1DecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        use_bias = config.get("attention_bias", False)
        routing = sigmoid_routing(config, renormalize=config.get("norm_topk_prob", False))
        is_sparse = is_sparse_layer(scope.config, scope.layer_index, default_first_sparse=0)
        num_shared = config["n_shared_experts"] if is_sparse else 0
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(scope / "self_attn", qk_norm=True, use_bias=use_bias, span=_span(scope)),
            mlp=dense_or_sparse(scope, routing, is_sparse=is_sparse, num_shared_experts=num_shared),
        )


class Dots1ForCausalLM(CausalLM):
    layer_class = Dots1DecoderLayer
    supported_values = (("moe_layer_freq", 1),)


def _span(scope: LayerScope) -> AttentionSpan:
    """Returns config.json's window, if any, for layers by `layer_types`, or else from `max_window_layers` on."""
    config = scope.config
    kind = listed_layer_type(config, scope.layer_index, FULL_ATTENTION, SLIDING_ATTENTION)
    if kind is not None:
        return layer_span(config, kind)
    window = config.get("sliding_window", 4096)
    return AttentionSpan(window) if scope.layer_index >= config.get("max_window_layers", 62) else FULL_CONTEXT


FAMILY = Family("dots.llm1", (Dots1ForCausalLM,), "norms on heads, DeepSeek V3's routing", gguf=("dots1",))
