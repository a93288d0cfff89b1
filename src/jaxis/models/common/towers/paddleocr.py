"""Image encoder of PaddleOCR-VL: SigLIP over an image of any aspect ratio, joined neighbours, a projector."""

from __future__ import annotations

import dataclasses

from jaxis.layers.leaves import layer_norm
from jaxis.models.common.towers.options import of_vision
from jaxis.models.common.towers.positions import AxialRope, Positions, stretched_positions
from jaxis.models.common.towers.projector import JOINED, Projection
from jaxis.models.common.towers.qwen import QwenVision
from jaxis.models.common.towers.siglip import SO400M, siglip_names


class PaddleOcrVision(QwenVision):
    unused = ("tower.head.", "tower.embeddings.packing_position_embedding.", "tower.embeddings.position_ids")
    names = siglip_names("visual", ("mlp_AR", "projector"))
    vision = dataclasses.replace(
        SO400M,
        merge_size=of_vision("spatial_merge_size", 2),
        positions=Positions(stretched_positions, image_size=384),
        rope=AxialRope(theta=10_000.0),
        expected={"model_type": ("paddleocr_vl_vision", "paddleocr_vl")},
    )
    make_projector = Projection(inner_sizes=(JOINED,), activation="gelu", make_norm=layer_norm)
