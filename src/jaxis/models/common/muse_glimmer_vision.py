"""Image encoder of Muse Glimmer: a transformer with windows in most layers, joined neighbours, products."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxis.config.layer_types import FULL_ATTENTION, listed_layer_type
from jaxis.layers.checkpoint_names import CheckpointNames
from jaxis.layers.leaves import linear, rms_norm
from jaxis.layers.mlp import activation_function
from jaxis.layers.module import JaxModule
from jaxis.layers.scope import LayerScope
from jaxis.models.common.vision_layers import merged
from jaxis.models.common.vision_positions import AxialRope, Positions, stretched_positions
from jaxis.models.common.vision_tower import Patches
from jaxis.models.common.vision_transformer import TransformerTower, VisionOptions, frame_convolution

if TYPE_CHECKING:
    from jaxis.config.hf_config import HFConfig

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


class MuseGlimmerProjector(JaxModule):
    """`norm(out_proj(act(fc2(act(fc1(x))))))` of joined neighbours, sorted by feature."""

    def __init__(self, scope: LayerScope, options: VisionOptions) -> None:
        config, self.num_merged = scope.config, options.num_merged
        config.expect("out_hidden_size", options.merged_size)
        size, text = config.get("projector_hidden_size", 4096), config["text_config"]
        self.fc1 = linear(scope / "fc1", options.merged_size, size, axes=("mlp", "embed"))
        self.act = activation_function(config.get("projector_hidden_act", "gelu"))
        self.fc2 = linear(scope / "fc2", size, size, axes=("embed", "mlp"))
        outer, epsilon = text["hidden_size"], text.get("rms_norm_eps", 1e-6)
        self.out_proj = linear(scope / "out_proj", size, outer, axes=("embed", "mlp"))
        self.norm = rms_norm(scope, outer, epsilon=epsilon, use_weight=False)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [P, C] -> [P / merge_size ** 2, E]."""
        x = merged(x, self.num_merged, by_feature=True)
        return self.norm(self.out_proj(self.act(self.fc2(self.act(self.fc1(x))))))


class MuseGlimmerVision(TransformerTower):
    config_keys = (
        *("vision_config", "out_hidden_size", "projector_hidden_size", "projector_hidden_act"),
        *("text_config.hidden_size", "text_config.rms_norm_eps"),
    )
    names = CheckpointNames(
        (
            *(("vision_tower", "tower"), ("vision_adapter", "projector")),
            ("vision_projection", "projector.out_proj"),
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
