"""Image encoder of PaddleOCR-VL: SigLIP over an image of any aspect ratio, joined neighbours, a projector."""

from __future__ import annotations

import dataclasses

from jaxis.config.hf_config import HFConfig
from jaxis.layers.leaves import layer_norm
from jaxis.layers.scope import LayerScope
from jaxis.models.common.qwen_vision import QwenVision, qwen_projector
from jaxis.models.common.siglip import SO400M, siglip_names, siglip_options
from jaxis.models.common.vision_positions import AxialRope, stretched_positions
from jaxis.models.common.vision_projector import VisionProjector
from jaxis.models.common.vision_transformer import VisionOptions

_DEFAULTS = dataclasses.replace(SO400M, rope=AxialRope(theta=10_000.0))


class PaddleOcrVision(QwenVision):
    unused = ("tower.head.", "tower.embeddings.packing_position_embedding.", "tower.embeddings.position_ids")
    names = siglip_names("visual", ("mlp_AR", "projector"))

    @classmethod
    def options(cls, config: HFConfig) -> VisionOptions:
        vision = config["vision_config"]
        positions = {"image_size": 384, "look_up": stretched_positions}
        changes = {"merge_size": vision.get("spatial_merge_size", 2)}
        return siglip_options(vision, _DEFAULTS, "paddleocr_vl_vision", "paddleocr_vl", **positions, **changes)

    @classmethod
    def make_projector(cls, scope: LayerScope, options: VisionOptions) -> VisionProjector:
        # The text's keys may have no object of their own.
        own_size = scope.config.get("hidden_size", None)
        size = scope.config.get_text_config().get("hidden_size", own_size)
        return qwen_projector(scope, options, size, make_norm=layer_norm, epsilon=1e-5)
