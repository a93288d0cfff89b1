"""Image encoder of Pixtral (arXiv:2410.07073) and Mistral 3: a transformer, merged neighbours, a projector."""

from __future__ import annotations

import dataclasses

import jax

from jaxis.layers.checkpoint_names import CheckpointNames
from jaxis.layers.leaves import linear, rms_norm
from jaxis.layers.scope import LayerScope
from jaxis.models.common.towers.layers import merged
from jaxis.models.common.towers.options import VisionOptions, of_model
from jaxis.models.common.towers.positions import AxialRope, rotate_halves_in_type
from jaxis.models.common.towers.projector import Projection, VisionProjector
from jaxis.models.common.towers.siglip import PROJECTOR
from jaxis.models.common.towers.tower import VisionTower

PIXTRAL = VisionOptions(
    *(1024, 4096, 24, 16, 16, "gelu"),
    is_gated=True,
    make_norm=rms_norm,
    epsilon=1e-5,
    norms=("pre_norm",),
    rope=AxialRope(theta=10_000.0, rotate=rotate_halves_in_type, splits_frequencies=True),
    qkv_bias=False,
    out_bias=False,
    expected={"model_type": ("pixtral",), "head_dim": lambda options: options.head_dim},
    ignored={"image_size": "positions have no table; the processor limits the size"},
)


class PixtralProjector(VisionProjector):
    """A norm, a product that merges neighbours, and a projection to embeddings of the text."""

    def __init__(self, scope: LayerScope, options: VisionOptions) -> None:
        config, size, self.num_neighbours = scope.config, options.hidden_size, options.num_merged
        super().__init__(
            scope, options, Projection(num_merged=1, use_bias=of_model("multimodal_projector_bias", False))
        )
        self.norm = rms_norm(scope, size, epsilon=config["text_config"].get("rms_norm_eps", 1e-6))
        self.merging_layer = linear(scope / "merging_layer", options.merged_size, size, axes=("embed", None))

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [P, C] -> [P / merge_size ** 2, E]."""
        return super().__call__(self.merging_layer(merged(self.norm(x), self.num_neighbours, by_feature=True)))


class PixtralVision(VisionTower):
    names = CheckpointNames(
        (
            *(("vision_tower", "tower"), ("tower.patch_conv", "tower.patch_embed"), ("tower.ln_pre", "tower.pre_norm")),
            *(("tower.transformer.layers", "tower.layers"), ("attention_norm", "norm1"), ("ffn_norm", "norm2")),
            *(("attention", "attn"), ("feed_forward", "mlp"), PROJECTOR),
            ("projector.patch_merger.merging_layer", "projector.merging_layer"),
        )
    )
    vision = dataclasses.replace(
        PIXTRAL, merge_size=of_model("spatial_merge_size", 2), expected_outside={"vision_feature_layer": (-1, [-1])}
    )
    make_projector = PixtralProjector
