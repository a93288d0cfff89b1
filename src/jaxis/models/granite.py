"""Granite 3 (dense): the Llama layer with multipliers on embeddings, scores, residuals and logits.

Granite SWA adds windows, attention sinks and a rope per layer.
"""

from __future__ import annotations

from jaxis.config.layer_types import SLIDING_ATTENTION
from jaxis.layers.scope import LayerScope
from jaxis.models.common.family import Family
from jaxis.models.common.granite import GraniteCausalLM, GraniteDecoderLayer, granite_window_arguments


class GraniteSWADecoderLayer(GraniteDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        super().__init__(scope, **granite_window_arguments(scope))


def _layer(scope: LayerScope) -> GraniteDecoderLayer:
    """Creates a layer. Some files of Granite SWA have the older class's name, with `layer_types`."""
    if SLIDING_ATTENTION not in scope.config.get("layer_types", ()):
        return GraniteDecoderLayer(scope)
    has_sinks = scope.config.get("attention_sinks", True)
    return GraniteDecoderLayer(scope, **granite_window_arguments(scope) | {"use_sinks": has_sinks})


class GraniteForCausalLM(GraniteCausalLM):
    layer_class = _layer


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
    gguf=("granite_swa",),
)
