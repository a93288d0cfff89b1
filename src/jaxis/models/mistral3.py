"""Ministral 3: Mistral with queries scaled by position; and Mistral Small 3.1 to 4 and Medium 3.5, with images."""

from __future__ import annotations

from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family
from jaxis.models.common.mistral import Ministral3DecoderLayer, Mistral4DecoderLayer
from jaxis.models.common.text_part import TextPart
from jaxis.models.common.towers.pixtral import PixtralVision


class Ministral3ForCausalLM(CausalLM):
    layer_class = Ministral3DecoderLayer


def _layer_of_text(scope: LayerScope) -> PreNormDecoderLayer:
    is_mistral4 = scope.config.get("model_type") == "mistral4"
    return Mistral4DecoderLayer(scope) if is_mistral4 else Ministral3DecoderLayer(scope)


class Mistral3ForConditionalGeneration(TextPart, CausalLM):
    is_tied_outside = True
    tower = PixtralVision
    layer_class = _layer_of_text
    text_model_types = ("mistral", "ministral3", "mistral4")
    other_parts = ("vision_tower", "multi_modal_projector")
    other_keys = ("projector_hidden_act", "vision_feature_layer", "spatial_merge_size", "multimodal_projector_bias")


FAMILY = Family(
    "Ministral 3; Mistral Small 3.1, 3.2, Medium 3.5",
    (Ministral3ForCausalLM, Mistral3ForConditionalGeneration),
    "queries scaled by position (Ministral 3), YaRN; Pixtral's vision tower",
    formats=("fp8",),
    gguf=("mistral3",),
)
