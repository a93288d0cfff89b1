"""Image encoder of MiniMax M3: CLIP's layers with RoPE by time, row and column, and two projectors."""

from __future__ import annotations

import dataclasses

import jax

from jaxis.config.hf_config import HFConfig
from jaxis.layers.scope import LayerScope
from jaxis.models.common.towers.options import VisionOptions, of_model, of_vision
from jaxis.models.common.towers.patches import Patches
from jaxis.models.common.towers.positions import AxialRope, rotate_halves_in_type
from jaxis.models.common.towers.projector import Projection
from jaxis.models.common.towers.siglip import PROJECTOR, siglip_names
from jaxis.models.common.towers.tower import VisionTower
from jaxis.models.common.towers.transformer import frame_convolution

_PROJECTION = Projection(num_merged=1, inner_sizes=(of_model("projector_hidden_size", 6144),))


class MiniMaxM3Vision(VisionTower):
    """The vision tower, where one projector maps each patch and another one the joined neighbours."""

    prefixes = (*VisionTower.prefixes, "merger.")
    names = siglip_names(
        "vision_tower", ("tower.pre_layrnorm", "tower.pre_norm"), PROJECTOR, ("patch_merge_mlp", "merger")
    )
    vision = VisionOptions(
        *(1280, 5120, 32, 16, 14, "gelu"),
        merge_size=of_vision("spatial_merge_size", 2),
        num_frames=of_vision("temporal_patch_size", 2),
        epsilon=of_vision("layer_norm_eps", 1e-5),
        embed_patches=frame_convolution,
        norms=("pre_norm",),
        rope=AxialRope(theta=10_000.0, rotate=rotate_halves_in_type, counts_time=True),
        expected={"position_embedding_type": ("rope",), "rope_mode": ("3d",)},
        ignored=dict.fromkeys(
            ("model_type", "image_size", "projection_dim", "vision_segment_max_frames"),
            "it is about video or the processor, or says again what the class says",
        ),
        expected_outside={"multimodal_projector_bias": (True,)},
    )
    make_projector = _PROJECTION

    @classmethod
    def options(cls, config: HFConfig) -> VisionOptions:
        options = super().options(config)
        for merging in (part.get("img_token_compression_config") for part in (config, config["vision_config"])):
            if merging is not None:
                merging.expect("image_token_compression_method", "patch_merge")
                merging.expect("spatial_merge_size", options.merge_size)
                merging.expect("temporal_patch_size", options.num_frames)
        return options

    def add_parts(self, scope: LayerScope) -> None:
        of_text = dataclasses.replace(self.tower.options, hidden_size=scope.config.get_text_config()["hidden_size"])
        self.merger = dataclasses.replace(_PROJECTION, num_merged=None)(scope / "merger", of_text)

    def __call__(self, patches: Patches) -> jax.Array:
        return self.merger(super().__call__(patches))
