"""Ministral 3: Mistral with queries scaled by position; the text of Mistral Small 3.1, 3.2 and Medium 3.5."""

from __future__ import annotations

from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.mistral import Ministral3DecoderLayer
from jaxis.models.common.text_part import TextPart


class Ministral3ForCausalLM(CausalLM):
    layer_class = Ministral3DecoderLayer


class Mistral3ForConditionalGeneration(TextPart, Ministral3ForCausalLM):
    """The multimodal checkpoints; images are not supported."""

    text_model_types = ("mistral", "ministral3")
    other_parts = ("vision_tower", "multi_modal_projector")
    other_keys = (
        *("vision_config", "image_token_index", "projector_hidden_act", "vision_feature_layer", "spatial_merge_size"),
        *("multimodal_projector_bias",),
    )
