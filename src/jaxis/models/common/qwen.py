"""Code shared by Qwen2, Qwen3 and models with their text: decoder layers, windows, experts."""

from __future__ import annotations

from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.config.layer_types import FULL_ATTENTION, SLIDING_ATTENTION, listed_layer_type
from jaxis.config.rope_config import rope_config
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.experts import StackLayout
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import FeedForward, GatedMLP
from jaxis.layers.moe import SparseMoE
from jaxis.layers.routing import Routing
from jaxis.layers.scope import LayerScope

QWEN3_VL_MROPE = (24, 20, 20)
"""Default numbers of pairs that go by time, row and column."""

QWEN_MOE_RENAMES = (("mlp.shared_expert", "mlp.shared_experts"),)
"""Name of the shared expert in checkpoints -> its name here."""


def qwen_layer_span(scope: LayerScope) -> AttentionSpan:
    """Returns the layer's attention span. Raises ConfigError if `layer_types` has no known type for the layer.

    `use_sliding_window` enables windows in the layers that `layer_types` lists. Without that list, layers from
    `max_window_layers` on have them.
    """
    config = scope.config
    config.ignore("max_window_layers", because="it matters only with use_sliding_window and without layer_types")
    config.ignore("sliding_window", because="only layers with a window use it")
    kind = listed_layer_type(config, scope.layer_index, FULL_ATTENTION, SLIDING_ATTENTION)
    if not config.get("use_sliding_window", False):
        return FULL_CONTEXT
    if kind is None:
        has_window = scope.layer_index >= config.get("max_window_layers", 28)
    else:
        has_window = kind == SLIDING_ATTENTION
    return AttentionSpan(config.get("sliding_window", 4096)) if has_window else FULL_CONTEXT


class Qwen2DecoderLayer(PreNormDecoderLayer):
    """The Llama layer with biases on queries, keys and values, and an optional window."""

    def __init__(self, scope: LayerScope) -> None:
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(scope / "self_attn", qkv_bias=True, span=qwen_layer_span(scope)),
            mlp=GatedMLP(scope / "mlp"),
        )


class Qwen3DecoderLayer(PreNormDecoderLayer):
    """The Llama layer with a norm on each query and key head.

    `mrope` has the default numbers of pairs for time, row and column, of a model that reads images.
    """

    def __init__(self, scope: LayerScope, *, mrope: tuple[int, ...] | None = None) -> None:
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(
                scope / "self_attn",
                head_dim=128,
                rope_settings=rope_config(scope.config, default_interleaved_mrope=mrope),
                qk_norm=True,
                use_bias=scope.config.get("attention_bias", False),
                span=qwen_layer_span(scope),
            ),
            mlp=GatedMLP(scope / "mlp"),
        )


def qwen_feed_forward(
    scope: LayerScope,
    *,
    renormalize: bool,
    shared_size: int = 0,
    stack_layout: StackLayout | None = None,
) -> FeedForward:
    """Returns a layer's dense block or mixture of experts, by `mlp_only_layers` and `decoder_sparse_step`.

    `renormalize` is that of `Routing`, `stack_layout` that of `JaxExperts`. `shared_size` is F of a shared expert
    behind a gate; 0 for none.
    """
    config = scope.config
    routing = Routing.of(config, renormalize=renormalize)
    is_listed_as_dense = scope.layer_index in config.get("mlp_only_layers", [])
    if is_listed_as_dense or (scope.layer_index + 1) % config.get("decoder_sparse_step", 1):
        return GatedMLP(scope / "mlp")
    return SparseMoE(
        scope / "mlp",
        routing,
        stack_layout=stack_layout,
        shared_size=shared_size,
        use_shared_gate=shared_size > 0,
    )
