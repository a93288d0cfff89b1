"""SigLIP's vision transformer (arXiv:2303.15343), the first part of many image encoders."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxis.config.hf_config import HFConfig
from jaxis.layers.checkpoint_names import CheckpointNames, Rename
from jaxis.models.common.vision_layers import num_places
from jaxis.models.common.vision_positions import LookUp, Positions, learned
from jaxis.models.common.vision_transformer import VisionOptions

BASE = VisionOptions(768, 3072, 12, 12, 16, "gelu_pytorch_tanh", patch_bias=True, norms=("post_norm",))
SO400M = dataclasses.replace(BASE, hidden_size=1152, intermediate_size=4304, num_layers=27, num_heads=16, patch_size=14)
PROJECTOR: Rename = ("multi_modal_projector", "projector")


def siglip_names(module: str, *others: Rename) -> CheckpointNames:
    """Returns the names of a transformer in `module`, with or without a `vision_model`, and those of other parts."""
    own = (
        (module, "tower"),
        ("tower.embeddings.patch_embedding", "tower.patch_embed"),
        ("tower.embeddings.position_embedding", "tower.position_embed"),
        *(("tower.encoder.layers", "tower.layers"), ("self_attn", "attn"), ("attn.out_proj", "attn.o_proj")),
        *(("layer_norm1", "norm1"), ("layer_norm2", "norm2"), ("tower.post_layernorm", "tower.post_norm")),
    )
    return CheckpointNames((*own, *others), other_names=((f"{module}.vision_model", module),))


def siglip_options(
    vision: HFConfig,
    defaults: VisionOptions = BASE,
    *model_types: str,
    image_size: int = 224,
    look_up: LookUp = learned,
    **changes: Any,
) -> VisionOptions:
    """Reads a `vision_config`, by default of SigLIP's own `model_type`, and changes options of it.

    Raises:
      ConfigError: A setting is not supported.
    """
    options = defaults.read(vision, *(model_types or ("siglip_vision_model",)), epsilon="layer_norm_eps")
    for key in ("max_image_size", "size", "use_base_siglip"):
        vision.ignore(key, because="the tower has no such setting: the processor's are in its own file")
    positions = Positions((num_places(vision, image_size, options.patch_size),), look_up)
    return dataclasses.replace(options, positions=positions, **changes)
