"""DeepSeek-VL (arXiv:2403.05525): Llama's layer, with SigLIP's tower and two products."""

from __future__ import annotations

from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family
from jaxis.models.common.llama import LlamaDecoderLayer
from jaxis.models.common.text_part import InnerTextPart
from jaxis.models.common.towers.projector import Projection
from jaxis.models.common.towers.siglip import BASE, siglip_names
from jaxis.models.common.towers.tower import VisionTower


class DeepseekVLVision(VisionTower):
    unused = ("tower.head.",)
    names = siglip_names("vision_model", ("aligner", "projector"), ("linear1", "linear_1"), ("linear2", "linear_2"))
    vision = BASE
    make_projector = Projection(activation="gelu")


class DeepseekVLForConditionalGeneration(InnerTextPart, CausalLM):
    is_tied_outside = True
    tower = DeepseekVLVision
    layer_class = LlamaDecoderLayer
    text_model_types = ("llama",)
    other_parts = ("model.vision_model", "model.aligner")


FAMILY = Family(
    "DeepSeek-VL",
    (DeepseekVLForConditionalGeneration,),
    "the text is a Llama; SigLIP's tower",
)
