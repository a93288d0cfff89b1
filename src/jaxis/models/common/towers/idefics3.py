"""Image encoder of Idefics3 and SmolVLM: SigLIP's transformer, joined neighbours, one product."""

from __future__ import annotations

import dataclasses

from jaxis.models.common.towers.options import of_model
from jaxis.models.common.towers.projector import Projection
from jaxis.models.common.towers.siglip import BASE, siglip_names
from jaxis.models.common.towers.tower import VisionTower


class Idefics3Vision(VisionTower):
    names = siglip_names("vision_model", ("connector.modality_projection.proj", "projector.linear_1"))
    vision = dataclasses.replace(
        BASE,
        hidden_size=1152,
        num_heads=16,
        patch_size=32,
        merge_size=of_model("scale_factor", 2),
        expected={"model_type": ("idefics3", "idefics3_vision", "smolvlm_vision")},
    )
    make_projector = Projection(inner_sizes=(), use_bias=False)
