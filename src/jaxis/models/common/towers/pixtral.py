"""Image encoder of Pixtral (arXiv:2410.07073) and Mistral 3: a transformer, merged neighbours, a projector."""

from __future__ import annotations

import dataclasses

import jax

from jaxis.layers.checkpoint_names import CheckpointNames
from jaxis.layers.leaves import linear, rms_norm
from jaxis.layers.scope import LayerScope
from jaxis.models.common.towers.layers import merged
from jaxis.models.common.towers.options import VisionOptions, of_model
from jaxis.models.common.towers.positions import AxialRope, rotate_halves_in_type, rotate_pairs
from jaxis.models.common.towers.projector import Projection, VisionProjector
from jaxis.models.common.towers.siglip import PROJECTOR
from jaxis.models.common.towers.tower import VisionTower

_ROPE = AxialRope(theta=10_000.0, rotate=rotate_halves_in_type, splits_frequencies=True)
PIXTRAL = VisionOptions(
    *(1024, 4096, 24, 16, 16, "gelu"),
    is_gated=True,
    make_norm=rms_norm,
    epsilon=1e-5,
    norms=("pre_norm",),
    rope=_ROPE,
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


class MistralLarge4Vision(PixtralVision):
    """The vision tower of Mistral Large 4, with Mistral's own names and order of queries and keys."""

    names = CheckpointNames(
        (
            *(("vision_encoder", "vision_tower"), ("pre_mm_projector_norm", "multi_modal_projector.norm")),
            ("patch_merger.merging_layer", "multi_modal_projector.patch_merger.merging_layer"),
            ("vision_language_adapter.w_in", "multi_modal_projector.linear_1"),
            ("vision_language_adapter.w_out", "multi_modal_projector.linear_2"),
            *((f"attention.w{name}", f"attention.{name}_proj") for name in "qkvo"),
            *(("feed_forward.w1", "feed_forward.gate_proj"), ("feed_forward.w2", "feed_forward.down_proj")),
            *(("feed_forward.w3", "feed_forward.up_proj"), *PixtralVision.names.renames),
        )
    )
    vision = dataclasses.replace(PixtralVision.vision, rope=dataclasses.replace(_ROPE, rotate=rotate_pairs))
