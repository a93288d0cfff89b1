"""Image encoder of Llama 4: a transformer over squares, joined neighbours, a projector."""

from __future__ import annotations

import dataclasses

import jax

from jaxis.config.hf_config import HFConfig
from jaxis.layers.checkpoint_names import CheckpointNames
from jaxis.layers.module import JaxModule
from jaxis.layers.scope import LayerScope
from jaxis.models.common.vision_layers import num_places
from jaxis.models.common.vision_positions import AxialRope, Positions, learned, rotate_pairs
from jaxis.models.common.vision_projector import VisionProjector
from jaxis.models.common.vision_transformer import TransformerTower, VisionOptions, patch_product


class Llama4PatchEmbedding(JaxModule):
    """A product with each patch, whose pixels are first sorted by channel."""

    def __init__(self, scope: LayerScope, options: VisionOptions) -> None:
        self.linear = patch_product(scope / "linear", options)

    def __call__(self, pixels: jax.Array) -> jax.Array:
        """pixels [P, patch * patch * 3], channels last -> [P, C]."""
        by_channel = pixels.reshape(pixels.shape[0], -1, 3).swapaxes(1, 2)
        return self.linear(by_channel.reshape(pixels.shape))


_DEFAULTS = VisionOptions(
    *(768, 5632, 34, 16, 14, "gelu"),
    epsilon=1e-5,
    norms=("pre_norm", "post_norm"),
    embed_patches=Llama4PatchEmbedding,
    rope=AxialRope(theta=10_000.0, rotate=rotate_pairs, columns_first=True, first=1),
)


def llama4_projector(scope: LayerScope, options: VisionOptions) -> VisionProjector:
    """Creates three products, of which the tower's config has the first two sizes."""
    vision = scope.config["vision_config"]
    sizes = vision.get("projector_input_dim", 4096), vision.get("projector_output_dim", 4096)
    vision.expect("vision_output_dim", sizes[1])
    return VisionProjector(scope, options, inner_sizes=sizes, activation="gelu", use_bias=False)


class Llama4Vision(TransformerTower):
    names = CheckpointNames(
        (
            *(("vision_model.vision_adapter.mlp", "projector"), ("projector.fc1", "projector.linear_1")),
            ("projector.fc2", "projector.linear_2"),
            ("multi_modal_projector.linear_1", "projector.linear_3"),
            *(("vision_model", "tower"), ("tower.patch_embedding", "tower.patch_embed")),
            ("tower.positional_embedding_vlm", "tower.position_embed.weight"),
            *(("tower.class_embedding", "tower.class_token"), ("tower.model.layers", "tower.layers")),
            *(("tower.layernorm_pre", "tower.pre_norm"), ("tower.layernorm_post", "tower.post_norm")),
            *(("input_layernorm", "norm1"), ("self_attn", "attn"), ("post_attention_layernorm", "norm2")),
        )
    )
    make_projector = llama4_projector

    @classmethod
    def options(cls, config: HFConfig) -> VisionOptions:
        vision = config["vision_config"]
        options = _DEFAULTS.read(vision, "llama4_vision_model")
        vision.expect("hidden_act", "gelu")
        vision.expect("vision_feature_select_strategy", "default")
        vision.expect("multi_modal_projector_bias", False)
        vision.expect("projector_dropout", 0.0)
        vision.ignore("norm_eps", because="the reference's norms have 1e-5, whatever it says")
        places = num_places(vision, 448, options.patch_size)
        options = dataclasses.replace(
            options,
            merge_size=round(1 / vision.get("pixel_shuffle_ratio", 0.5)),
            class_shape=(options.hidden_size,),
            positions=Positions((places + 1,), learned, class_place=-1),
        )
        vision.expect("intermediate_size", options.merged_size)
        return options
