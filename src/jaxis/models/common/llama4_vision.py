"""Image encoder of Llama 4: a transformer over squares, joined neighbours, a projector."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax

from jaxis.layers.checkpoint_names import CheckpointNames
from jaxis.layers.leaves import linear
from jaxis.layers.mlp import activation_function
from jaxis.layers.module import JaxModule
from jaxis.layers.scope import LayerScope
from jaxis.models.common.vision_layers import merged, num_places
from jaxis.models.common.vision_positions import AxialRope, Positions, learned, rotate_pairs
from jaxis.models.common.vision_transformer import TransformerTower, VisionOptions, patch_product

if TYPE_CHECKING:
    from jaxis.config.hf_config import HFConfig


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


class Llama4Projector(JaxModule):
    """`linear_1(act(fc2(act(fc1(x)))))` of joined neighbours."""

    def __init__(self, scope: LayerScope, options: VisionOptions) -> None:
        vision, self.num_merged = scope.config["vision_config"], options.num_merged
        inner, size = vision.get("projector_input_dim", 4096), vision.get("projector_output_dim", 4096)
        vision.expect("vision_output_dim", size)
        self.fc1 = linear(scope / "fc1", options.merged_size, inner, axes=("mlp", "embed"))
        self.act = activation_function("gelu")
        self.fc2 = linear(scope / "fc2", inner, size, axes=("embed", "mlp"))
        outer = scope.config["text_config"]["hidden_size"]
        self.linear_1 = linear(scope / "linear_1", size, outer, axes=("embed", "mlp"))

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [P, C] -> [P / merge_size ** 2, E]."""
        return self.linear_1(self.act(self.fc2(self.act(self.fc1(merged(x, self.num_merged))))))


class Llama4Vision(TransformerTower):
    config_keys = ("vision_config", "text_config.hidden_size")
    names = CheckpointNames(
        (
            *(
                ("vision_model.vision_adapter.mlp", "projector"),
                ("multi_modal_projector.linear_1", "projector.linear_1"),
            ),
            *(("vision_model", "tower"), ("tower.patch_embedding", "tower.patch_embed")),
            ("tower.positional_embedding_vlm", "tower.position_embed.weight"),
            *(("tower.class_embedding", "tower.class_token"), ("tower.model.layers", "tower.layers")),
            *(("tower.layernorm_pre", "tower.pre_norm"), ("tower.layernorm_post", "tower.post_norm")),
            *(("input_layernorm", "norm1"), ("self_attn", "attn"), ("post_attention_layernorm", "norm2")),
        )
    )
    make_projector = Llama4Projector

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
