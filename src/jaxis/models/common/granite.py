"""Code shared by Granite's families: multipliers on embeddings, scores, residuals and logits."""

from __future__ import annotations

from typing import Any

from jaxis.config.layer_settings import value_of_layer
from jaxis.config.layer_types import FULL_ATTENTION, SLIDING_ATTENTION, layer_span, listed_layer_type
from jaxis.config.rope_config import rope_config
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.experts import StackLayout
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import FeedForward, GatedMLP
from jaxis.layers.moe import SparseMoE
from jaxis.layers.routing import Routing
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM, DecoderOptions


class GraniteBaseDecoderLayer(PreNormDecoderLayer):
    """The Llama layer with multipliers on scores and residuals, and further arguments of `GroupedQueryAttention`."""

    def __init__(self, scope: LayerScope, mlp: FeedForward, **attention: Any) -> None:
        super().__init__(
            scope,
            self_attn=granite_attention(scope / "self_attn", **attention),
            mlp=mlp,
            residual_multiplier=scope.config.get("residual_multiplier", 1.0),
        )


class GraniteDecoderLayer(GraniteBaseDecoderLayer):
    """The dense layer, with further arguments of `GroupedQueryAttention`."""

    def __init__(self, scope: LayerScope, **attention: Any) -> None:
        super().__init__(scope, GatedMLP(scope / "mlp", use_bias=scope.config.get("mlp_bias", False)), **attention)


def granite_attention(scope: LayerScope, **arguments: Any) -> GroupedQueryAttention:
    """Attention with a multiplier of scores, and further arguments of `GroupedQueryAttention`."""
    arguments.setdefault("scale", scope.config.get("attention_multiplier", 1.0))
    return GroupedQueryAttention(scope, use_bias=scope.config.get("attention_bias", False), **arguments)


def granite_window_arguments(scope: LayerScope) -> dict[str, Any]:
    """Arguments of `granite_attention` for Granite SWA: a window in three of four layers, sinks, a rope per layer.

    Raises ConfigError if a list in config.json does not have one entry per layer.
    """
    config, index = scope.config, scope.layer_index
    kind = listed_layer_type(config, index, FULL_ATTENTION, SLIDING_ATTENTION)
    if kind is None:
        kind = SLIDING_ATTENTION if index % 4 else FULL_ATTENTION
    theta = value_of_layer(config, "layer_rope_theta", index)
    return {
        "use_rope": theta != 0,
        "rope_settings": rope_config(config, theta=theta or None),
        "span": layer_span(config, kind, default_window=128),
        "use_sinks": True,
    }


def granite_moe(scope: LayerScope) -> SparseMoE:
    """A mixture of experts with one tensor per projection; see GRANITE_MOE_RENAMES."""
    config = scope.config
    return SparseMoE(
        scope,
        Routing.of(config, renormalize=True),
        intermediate_size=config["intermediate_size"],
        stack_layout=StackLayout(transposed=False),
    )


GRANITE_MOE_RENAMES = (
    ("block_sparse_moe", "mlp"),
    ("mlp.router.layer", "mlp.gate"),
    ("mlp.input_linear.weight", "mlp.experts.gate_up_proj"),
    ("mlp.output_linear.weight", "mlp.experts.down_proj"),
)
"""Names of the block of experts and its parts in the checkpoint -> their names here."""


class GraniteCausalLM(CausalLM):
    """Base of models with multipliers on embeddings and logits; each model sets its layer class."""

    @classmethod
    def options(cls, scope: LayerScope) -> DecoderOptions:
        return DecoderOptions(
            embedding_multiplier=scope.config.get("embedding_multiplier", 1.0),
            logits_multiplier=1.0 / scope.config.get("logits_scaling", 1.0),
        )
