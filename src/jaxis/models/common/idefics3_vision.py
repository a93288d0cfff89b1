"""Image encoder of Idefics3 and SmolVLM: SigLIP's transformer, joined neighbours, one product."""

from __future__ import annotations

import dataclasses
import functools

from jaxis.config.hf_config import HFConfig
from jaxis.models.common.siglip import BASE, siglip_names, siglip_options
from jaxis.models.common.vision_projector import VisionProjector
from jaxis.models.common.vision_transformer import TransformerTower, VisionOptions

_DEFAULTS = dataclasses.replace(BASE, hidden_size=1152, num_heads=16, patch_size=32)


class Idefics3Vision(TransformerTower):
    names = siglip_names("vision_model", ("connector.modality_projection.proj", "projector.linear_1"))
    make_projector = functools.partial(VisionProjector, inner_sizes=(), use_bias=False)

    @classmethod
    def options(cls, config: HFConfig) -> VisionOptions:
        kinds = ("idefics3", "idefics3_vision", "smolvlm_vision")
        return siglip_options(config["vision_config"], _DEFAULTS, *kinds, merge_size=config.get("scale_factor", 2))
