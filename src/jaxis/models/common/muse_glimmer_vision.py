"""Image encoder of Muse Glimmer: a transformer with windows in most layers, joined neighbours, products."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxis.config.hf_config import HFConfig
from jaxis.config.layer_types import FULL_ATTENTION, listed_layer_type
from jaxis.layers.checkpoint_names import CheckpointNames
from jaxis.layers.leaves import rms_norm
from jaxis.layers.scope import LayerScope
from jaxis.models.common.vision_positions import AxialRope, Positions, stretched_positions
from jaxis.models.common.vision_projector import VisionProjector
from jaxis.models.common.vision_tower import Patches
from jaxis.models.common.vision_transformer import TransformerTower, VisionOptions, frame_convolution

_ROPE = AxialRope(theta=10_000.0, columns_first=True, first=1)
_DEFAULTS = VisionOptions(
    *(1536, 8960, 50, 16, 14, "gelu"),
    merge_size=2,
    epsilon=1e-5,
    norms=("pre_norm", "post_norm"),
    window_side=32,
    rope=_ROPE,
)


def on_its_side(table: jax.Array, patches: Patches) -> jax.Array:
    """Looks up patches in the table of a square by interpolation -> float32 [P, C].

    Training counted positions line by line in the image, and read the counts as those of the transposed image.
    """
    # Padding is in the first row and column.
    width, height = jnp.max(patches.columns) + 1, jnp.max(patches.rows) + 1
    index = patches.rows * width + patches.columns
    transposed = patches._replace(rows=index // height, columns=index % height)
    return stretched_positions(table, transposed, is_zero_beyond=True)


class MuseGlimmerProjector(VisionProjector):
    """Three products of joined neighbours, sorted by feature, and a norm."""

    def __init__(self, scope: LayerScope, options: VisionOptions) -> None:
        config, text = scope.config, scope.config["text_config"]
        config.expect("out_hidden_size", options.merged_size)
        size = config.get("projector_hidden_size", 4096)
        super().__init__(scope, options, inner_sizes=(size, size), use_bias=False, by_feature=True)
        epsilon = text.get("rms_norm_eps", 1e-6)
        self.norm = rms_norm(scope, text["hidden_size"], epsilon=epsilon, use_weight=False)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(super().__call__(x))


class MuseGlimmerVision(TransformerTower):
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
    make_projector = MuseGlimmerProjector

    @classmethod
    def options(cls, config: HFConfig) -> VisionOptions:
        vision = config["vision_config"]
        options = _DEFAULTS.read(vision, "muse_glimmer_vision", merge_size="merge_size", window_side="pos_emb_height")
        vision.expect("layer_norm_eps", 1e-5)
        vision.expect("pos_emb_width", side := options.window_side or 0)
        vision.ignore("max_position_embeddings", because="the table of positions has as many places as its sides say")
        flat = {"num_frames": vision.get("patch_temporal", 2), "is_flat": True, "has_frames_first": True}
        return dataclasses.replace(
            options,
            embed_patches=functools.partial(frame_convolution, **flat),
            positions=Positions((side * side,), on_its_side),
            whole_layers=[i for i in range(options.num_layers) if _sees_all(vision, i, options.num_layers)],
        )


def _sees_all(vision: HFConfig, layer: int, num_layers: int) -> bool:
    """Returns whether a layer has no windows."""
    kind = listed_layer_type(vision, layer, FULL_ATTENTION, "window_attention")
    return (layer % 4 == 3 or layer == num_layers - 1) if kind is None else kind == FULL_ATTENTION
