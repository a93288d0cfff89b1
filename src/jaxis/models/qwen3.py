"""Qwen3 (dense), Qwen3-VL and LightOnOCR: the Llama layer with a norm on each query and key head."""

from __future__ import annotations

import functools

from jaxis.layers.checkpoint_names import CheckpointNames
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family
from jaxis.models.common.qwen import QWEN3_VL_MROPE, Qwen3DecoderLayer
from jaxis.models.common.text_part import InnerTextPart
from jaxis.models.common.towers.pixtral import PixtralVision
from jaxis.models.common.towers.qwen import Qwen3VLVision


class Qwen3ForCausalLM(CausalLM):
    layer_class = Qwen3DecoderLayer
    supported_values = (("use_qk_norm", True),)


class Qwen3VLForConditionalGeneration(InnerTextPart, Qwen3ForCausalLM):
    tower = Qwen3VLVision
    layer_class = functools.partial(Qwen3DecoderLayer, mrope=QWEN3_VL_MROPE)
    text_model_types = ("qwen3_vl_text",)


class LightOnOcrVision(PixtralVision):
    """The vision tower of LightOnOCR: Mistral 3's under other names."""

    names = CheckpointNames(
        (
            ("vision_encoder", "vision_tower"),
            ("vision_projection", "multi_modal_projector"),
            *PixtralVision.names.renames,
        )
    )


class LightOnOcrForConditionalGeneration(InnerTextPart, Qwen3ForCausalLM):
    is_tied_outside = True
    tower = LightOnOcrVision
    text_model_types = ("qwen3",)
    other_parts = ("model.vision_encoder", "model.vision_projection")
    other_keys = ("spatial_merge_size",)


FAMILY = Family(
    "Qwen3; Qwen3-VL; LightOnOCR",
    (Qwen3ForCausalLM, Qwen3VLForConditionalGeneration, LightOnOcrForConditionalGeneration),
    "a norm on each query and key head; Qwen's tower, M-RoPE, DeepStack",
    gguf=("qwen3", "qwen3vl"),
    defaults={"qwen3_vl_text": {"rope_theta": 500_000.0}},
)
