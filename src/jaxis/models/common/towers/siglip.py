"""SigLIP's vision transformer (arXiv:2303.15343), the first part of many image encoders."""

from __future__ import annotations

import dataclasses

from jaxis.layers.checkpoint_names import CheckpointNames, Rename
from jaxis.models.common.towers.options import VisionOptions, of_vision
from jaxis.models.common.towers.positions import Positions, learned

BASE = VisionOptions(
    *(768, 3072, 12, 12, 16, "gelu_pytorch_tanh"),
    epsilon=of_vision("layer_norm_eps", 1e-6),
    patch_bias=True,
    positions=Positions(learned, image_size=224),
    norms=("post_norm",),
    expected={"model_type": ("siglip_vision_model",)},
    ignored=dict.fromkeys(
        ("max_image_size", "size", "use_base_siglip"),
        "the tower has no such setting: the processor's are in its own file",
    ),
)
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
