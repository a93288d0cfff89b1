"""Vision models whose text is a Llama, a Mistral, a Qwen or a Granite: InternVL, SmolVLM, LLaVA, ..."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM, DecoderOptions
from jaxis.models.common.family import Family
from jaxis.models.common.granite import GraniteCausalLM, GraniteDecoderLayer
from jaxis.models.common.llama import LlamaDecoderLayer
from jaxis.models.common.mistral import MistralDecoderLayer
from jaxis.models.common.qwen import Qwen2DecoderLayer, Qwen3DecoderLayer
from jaxis.models.common.text_part import TextPart
from jaxis.models.common.towers.idefics3 import Idefics3Vision
from jaxis.models.common.towers.internvit import InternVLVision
from jaxis.models.common.towers.llava import LlavaNextVision, LlavaVision, VipLlavaVision
from jaxis.models.common.towers.tower import VisionTower

_LAYERS: Mapping[str, Callable[[LayerScope], PreNormDecoderLayer]] = {
    "llama": LlamaDecoderLayer,
    "mistral": MistralDecoderLayer,
    "qwen2": Qwen2DecoderLayer,
    "qwen3": Qwen3DecoderLayer,
    "granite": GraniteDecoderLayer,
}
_SEES = ("projector_hidden_act", "vision_feature_select_strategy", "vision_feature_layer")


def _layer_of_text(scope: LayerScope) -> PreNormDecoderLayer:
    return _LAYERS[scope.config.get("model_type", "llama")](scope)


class LlavaForConditionalGeneration(TextPart, CausalLM):
    """LLaVA 1.5, BakLLaVA, Pixtral 12B and others: the text model, with its image encoder."""

    tower: ClassVar[type[VisionTower] | None] = LlavaVision
    layer_class = _layer_of_text
    text_model_types = tuple(_LAYERS)
    other_parts = ("vision_tower", "multi_modal_projector")
    other_keys = (*_SEES, "image_seq_length", "multimodal_projector_bias")

    @classmethod
    def options(cls, scope: LayerScope) -> DecoderOptions:
        is_granite = scope.config.get("model_type") == "granite"
        return GraniteCausalLM.options(scope) if is_granite else super().options(scope)


class LlavaNextForConditionalGeneration(LlavaForConditionalGeneration):
    """LLaVA-NeXT (1.6) and Granite Vision: the text model, with its image encoder."""

    tower = LlavaNextVision
    other_parts = ("vision_tower", "multi_modal_projector", "image_newline")
    other_keys = (*LlavaForConditionalGeneration.other_keys, "image_grid_pinpoints", "use_image_newline_parameter")


class LlavaNextVideoForConditionalGeneration(LlavaNextForConditionalGeneration):
    """LLaVA-NeXT-Video: the text model, with its image encoder; videos are not supported."""

    other_parts = (*LlavaNextForConditionalGeneration.other_parts, "vision_resampler")
    other_keys = (
        *LlavaNextForConditionalGeneration.other_keys,
        *("video_seq_length", "spatial_pool_mode", "spatial_pool_stride"),
    )


class LlavaOnevisionForConditionalGeneration(LlavaNextForConditionalGeneration):
    other_keys = (*LlavaNextForConditionalGeneration.other_keys, "vision_aspect_ratio")


class VipLlavaForConditionalGeneration(LlavaForConditionalGeneration):
    tower = VipLlavaVision
    other_keys = (
        *LlavaForConditionalGeneration.other_keys,
        *("vision_feature_layers", "projector_layernorm_eps"),
    )


class VoxtralForConditionalGeneration(LlavaForConditionalGeneration):
    """Voxtral; sound is not supported."""

    tower = None
    other_parts = ("audio_tower", "multi_modal_projector")
    other_keys = ("audio_config", "projector_hidden_act", "hidden_size")


class Qwen2AudioForConditionalGeneration(VoxtralForConditionalGeneration):
    """Qwen2-Audio; sound is not supported."""

    other_keys = ("audio_config",)


class InternVLForConditionalGeneration(LlavaForConditionalGeneration):
    """InternVL 2.5, 3 and 3.5 in transformers' format: the text model, with its image encoder."""

    is_tied_outside = True
    tower = InternVLVision
    other_keys = (*_SEES, "image_seq_length", "downsample_ratio")


class Idefics3ForConditionalGeneration(TextPart, CausalLM):
    tower = Idefics3Vision
    layer_class = LlamaDecoderLayer
    text_renames = text_module_renames = (("model.text_model", "model"),)
    text_model_types = ("llama",)
    other_parts = ("model.vision_model", "model.connector")
    other_keys = ("scale_factor",)


class SmolVLMForConditionalGeneration(Idefics3ForConditionalGeneration):
    """SmolVLM and SmolVLM2."""


FAMILY = Family(
    "InternVL 2.5, 3 and 3.5, Idefics3, SmolVLM, LLaVA 1.5, LLaVA-NeXT, LLaVA-NeXT-Video, LLaVA-OneVision, "
    "ViP-LLaVA, Granite Vision 3, Pixtral 12B; Voxtral, Qwen2-Audio (text)",
    (
        LlavaForConditionalGeneration,
        LlavaNextForConditionalGeneration,
        LlavaNextVideoForConditionalGeneration,
        LlavaOnevisionForConditionalGeneration,
        VipLlavaForConditionalGeneration,
        VoxtralForConditionalGeneration,
        Qwen2AudioForConditionalGeneration,
        InternVLForConditionalGeneration,
        Idefics3ForConditionalGeneration,
        SmolVLMForConditionalGeneration,
    ),
    "the text is a Llama, a Mistral, a Qwen or a Granite; SigLIP's tower (Idefics3, SmolVLM), InternViT, CLIP's and "
    "Pixtral's",
)
