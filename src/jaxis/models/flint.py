"""Flint: Qwen3 MoE's layer with attention sinks, windows with a rope and full layers without, sigmoid experts."""

from __future__ import annotations

from jaxis.config.layer_types import FULL_ATTENTION, SLIDING_ATTENTION, layer_span, listed_layer_type
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import FeedForward
from jaxis.layers.routing import Routing
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family
from jaxis.models.common.sparse_layers import dense_or_sparse


class FlintDecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config, kind = scope.config, _kind(scope)
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(
                scope / "self_attn",
                head_dim=128,
                use_rope=kind == SLIDING_ATTENTION,
                qk_norm=True,
                use_bias=config.get("attention_bias", False),
                span=layer_span(config, kind, default_window=513),
                use_sinks=True,
            ),
            mlp=_feed_forward(scope),
        )


def _kind(scope: LayerScope) -> str:
    config, index = scope.config, scope.layer_index
    kind = listed_layer_type(config, index, FULL_ATTENTION, SLIDING_ATTENTION)
    if kind is not None:
        return kind
    is_full = index < 2 or index % 4 == 1 or index == config["num_hidden_layers"] - 1
    return FULL_ATTENTION if is_full else SLIDING_ATTENTION


def _feed_forward(scope: LayerScope) -> FeedForward:
    config = scope.config
    renormalize = config.get("norm_topk_prob", True)
    return dense_or_sparse(
        scope,
        Routing.of(config, score_function="sigmoid", renormalize=renormalize, float32_logits=True),
        is_sparse=scope.layer_index not in config.get("mlp_only_layers", [0, 1]),
        shared_size=config["shared_expert_intermediate_size"],
        use_selection_bias=False,
    )


class FlintForCausalLM(CausalLM):
    layer_class = FlintDecoderLayer
    router_aux_loss_coef = 0.0005
    renames = (("mlp.shared_expert", "mlp.shared_experts"), ("self_attn.softmax_offset", "self_attn.sinks"))
    supported_values = (("decoder_sparse_step", 1),)


FAMILY = Family(
    "Flint",
    (FlintForCausalLM,),
    "attention sinks, a window and RoPE in three of four layers and neither in the others, sigmoid experts",
)
