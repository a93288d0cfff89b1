"""Image encoder of Llama 4: a transformer over squares, joined neighbours, a projector."""

from __future__ import annotations

import jax

from jaxis.layers.checkpoint_names import CheckpointNames
from jaxis.layers.module import JaxModule
from jaxis.layers.scope import LayerScope
from jaxis.models.common.towers.options import VisionOptions, converted, of_vision
from jaxis.models.common.towers.positions import AxialRope, Positions, learned, rotate_pairs
from jaxis.models.common.towers.projector import Projection
from jaxis.models.common.towers.tower import VisionTower
from jaxis.models.common.towers.transformer import patch_product


class Llama4PatchEmbedding(JaxModule):
    """A product with each patch, whose pixels are first sorted by channel."""

    def __init__(self, scope: LayerScope, options: VisionOptions) -> None:
        self.linear = patch_product(scope / "linear", options)

    def __call__(self, pixels: jax.Array) -> jax.Array:
        """pixels [P, patch * patch * 3], channels last -> [P, C]."""
        by_channel = pixels.reshape(pixels.shape[0], -1, 3).swapaxes(1, 2)
        return self.linear(by_channel.reshape(pixels.shape))


_PROJECTED = of_vision("projector_input_dim", 4096), of_vision("projector_output_dim", 4096)


class Llama4Vision(VisionTower):
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
    vision = VisionOptions(
        *(768, 5632, 34, 16, 14, "gelu"),
        merge_size=converted(of_vision("pixel_shuffle_ratio", 0.5), lambda ratio: round(1 / ratio)),
        epsilon=1e-5,
        embed_patches=Llama4PatchEmbedding,
        positions=Positions(learned, image_size=448, class_place=-1),
        class_shape=(),
        norms=("pre_norm", "post_norm"),
        rope=AxialRope(theta=10_000.0, rotate=rotate_pairs, columns_first=True, first=1),
        expected={
            **{"model_type": ("llama4_vision_model",), "hidden_act": ("gelu",), "projector_dropout": (0.0,)},
            **{"vision_feature_select_strategy": ("default",), "multi_modal_projector_bias": (False,)},
            **{"intermediate_size": lambda options: options.merged_size, "vision_output_dim": (_PROJECTED[1],)},
        },
        ignored={"norm_eps": "the reference's norms have 1e-5, whatever it says"},
    )
    make_projector = Projection(inner_sizes=_PROJECTED, activation="gelu", use_bias=False)
