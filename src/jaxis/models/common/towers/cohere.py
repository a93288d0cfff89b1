"""Image encoders of Aya Vision and Command A Vision: SigLIP, joined neighbours, a gated projector."""

from __future__ import annotations

import dataclasses

from jaxis.layers.leaves import layer_norm
from jaxis.models.common.towers.options import of_model
from jaxis.models.common.towers.positions import Positions, learned
from jaxis.models.common.towers.projector import Projection
from jaxis.models.common.towers.siglip import PROJECTOR, SO400M, siglip_names
from jaxis.models.common.towers.tower import VisionTower

_GATED = Projection(activation="silu", is_gated=True)


class Cohere2Vision(VisionTower):
    unused = ("tower.head.", "tower.embeddings.position_ids")
    names = siglip_names("vision_tower", PROJECTOR, ("projector.layernorm", "projector.pre_norm"))
    vision = dataclasses.replace(
        SO400M,
        positions=Positions(learned, image_size=364),
        merge_size=of_model("downsample_factor", 2),
        expected_outside={"vision_feature_layer": (-1,), "vision_feature_select_strategy": ("full",)},
    )
    make_projector = dataclasses.replace(_GATED, inner_sizes=(of_model("alignment_intermediate_size", 36864),))


class AyaVision(Cohere2Vision):
    """The vision tower of Aya Vision, whose norm follows the joining instead of the layers."""

    unused = (*Cohere2Vision.unused, "tower.post_norm.")
    vision = dataclasses.replace(Cohere2Vision.vision, norms=())
    make_projector = dataclasses.replace(
        _GATED,
        inner_sizes=(of_model("alignment_intermediate_size", None),),
        make_norm=layer_norm,
        epsilon=of_model("adapter_layer_norm_eps", 1e-6),
        norms_merged=True,
    )
