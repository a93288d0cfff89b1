"""Granite 3 (dense): the Llama layer with multipliers on embeddings, scores, residuals and logits; Granite SWA adds
windows, attention sinks and ropes of the layers' own."""

from __future__ import annotations

from typing import Any

from jaxis.config.layer_types import FULL_ATTENTION, SLIDING_ATTENTION, layer_span, listed_layer_type
from jaxis.config.rope_config import rope_config
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.scope import LayerScope
from jaxis.models.common.family import Family
from jaxis.models.common.granite import GraniteBaseDecoderLayer, GraniteCausalLM


class GraniteDecoderLayer(GraniteBaseDecoderLayer):
    """The layer; `attention` are further arguments of `GroupedQueryAttention`."""

    def __init__(self, scope: LayerScope, **attention: Any) -> None:
        super().__init__(scope, GatedMLP(scope / "mlp", use_bias=scope.config.get("mlp_bias", False)), **attention)


class GraniteSWADecoderLayer(GraniteDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config, index = scope.config, scope.layer_index
        kind = listed_layer_type(config, index, FULL_ATTENTION, SLIDING_ATTENTION)
        if kind is None:
            kind = SLIDING_ATTENTION if index % 4 else FULL_ATTENTION
        thetas = config.get("layer_rope_theta")
        theta = thetas[index] if thetas else None
        super().__init__(
            scope,
            use_rope=theta != 0,
            rope_settings=rope_config(config, theta=theta or None),
            span=layer_span(config, kind, default_window=128),
            use_sinks=True,
        )


class GraniteForCausalLM(GraniteCausalLM):
    layer_class = GraniteDecoderLayer


class GraniteSWAForCausalLM(GraniteCausalLM):
    layer_class = GraniteSWADecoderLayer
    tied_by_default = True


FAMILY = Family(
    "Granite 3", (GraniteForCausalLM,), "multipliers on embeddings, residuals, scores and logits", gguf=("granite",)
)

GRANITE_SWA_FAMILY = Family(
    "Granite SWA",
    (GraniteSWAForCausalLM,),
    "as Granite 3, with attention sinks, a window in three of four layers, and a RoPE base for each layer",
)
