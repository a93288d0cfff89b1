"""Image encoder of Muse Glimmer: a transformer with windows in most layers, joined neighbours, products."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxis.config.hf_config import HFConfig
from jaxis.config.layer_types import FULL_ATTENTION, listed_layer_type
from jaxis.layers.checkpoint_names import CheckpointNames
from jaxis.layers.leaves import rms_norm
from jaxis.layers.scope import LayerScope
from jaxis.models.common.towers.layers import PatchConvolution
from jaxis.models.common.towers.options import VisionOptions, converted, of_model, of_vision
from jaxis.models.common.towers.patches import Patches
from jaxis.models.common.towers.positions import AxialRope, Positions, stretched_positions
from jaxis.models.common.towers.projector import Projection, VisionProjector
from jaxis.models.common.towers.tower import VisionTower
from jaxis.models.common.towers.transformer import frame_convolution

_SIDE = of_vision("pos_emb_height", 32)


def on_its_side(table: jax.Array, patches: Patches) -> jax.Array:
    """Looks up patches in the table of a square by interpolation -> float32 [P, C].

    Training counted positions line by line in the image, and read the counts as those of the transposed image.
    """
    # Padding is in the first row and column.
    width, height = jnp.max(patches.columns) + 1, jnp.max(patches.rows) + 1
    index = patches.rows * width + patches.columns
    transposed = patches._replace(rows=index // height, columns=index % height)
    return stretched_positions(table, transposed, is_zero_beyond=True)


def frames_of_rows(scope: LayerScope, options: VisionOptions) -> PatchConvolution:
    """Creates the convolution over frames, whose kernels are rows; images are views of one frame."""
    num_frames = scope.config.get("patch_temporal", 2)
    return frame_convolution(scope, options, num_frames=num_frames, is_flat=True, has_frames_first=True)


class MuseGlimmerProjector(VisionProjector):
    """Three products of joined neighbours, sorted by feature, and a norm."""

    def __init__(self, scope: LayerScope, options: VisionOptions) -> None:
        text, size = scope.config["text_config"], of_model("projector_hidden_size", 4096)
        super().__init__(scope, options, Projection(inner_sizes=(size, size), use_bias=False, by_feature=True))
        epsilon = text.get("rms_norm_eps", 1e-6)
        self.norm = rms_norm(scope, text["hidden_size"], epsilon=epsilon, use_weight=False)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(super().__call__(x))


class MuseGlimmerVision(VisionTower):
    names = CheckpointNames(
        (
            *(("vision_tower", "tower"), ("vision_adapter", "projector")),
            *(("projector.fc1", "projector.linear_1"), ("projector.fc2", "projector.linear_2")),
            ("vision_projection", "projector.linear_3"),
            ("tower.patch_embedder.patch_embedding", "tower.patch_embed"),
            ("tower.patch_embedder.position_embedding_table", "tower.position_embed"),
            *(("tower.ln_pre", "tower.pre_norm"), ("tower.ln_post", "tower.post_norm")),
            ("attn.proj", "attn.o_proj"),
        )
    )
    vision = VisionOptions(
        *(1536, 8960, 50, 16, 14, "gelu"),
        merge_size=of_vision("merge_size", 2),
        epsilon=1e-5,
        embed_patches=frames_of_rows,
        positions=Positions(on_its_side, (converted(_SIDE, lambda side: side * side),)),
        norms=("pre_norm", "post_norm"),
        rope=AxialRope(theta=10_000.0, columns_first=True, first=1),
        window_side=_SIDE,
        expected={"model_type": ("muse_glimmer_vision",), "layer_norm_eps": (1e-5,), "pos_emb_width": (_SIDE,)},
        ignored={"max_position_embeddings": "the table of positions has as many places as its sides say"},
        expected_outside={"out_hidden_size": lambda options: options.merged_size},
    )
    make_projector = MuseGlimmerProjector

    @classmethod
    def options(cls, config: HFConfig) -> VisionOptions:
        options, vision = super().options(config), config["vision_config"]
        whole = [i for i in range(options.num_layers) if _sees_all(vision, i, options.num_layers)]
        return dataclasses.replace(options, whole_layers=whole)


def _sees_all(vision: HFConfig, layer: int, num_layers: int) -> bool:
    """Returns whether a layer has no windows."""
    kind = listed_layer_type(vision, layer, FULL_ATTENTION, "window_attention")
    return (layer % 4 == 3 or layer == num_layers - 1) if kind is None else kind == FULL_ATTENTION
