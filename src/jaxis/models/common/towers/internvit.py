"""Image encoder of InternVL (arXiv:2504.10479): InternViT, joined neighbours, a projector."""

from __future__ import annotations

import jax

from jaxis.layers.checkpoint_names import CheckpointNames
from jaxis.layers.leaves import layer_norm, rms_norm
from jaxis.layers.module import JaxModule
from jaxis.layers.scope import LayerScope
from jaxis.models.common.towers.layers import parameter
from jaxis.models.common.towers.options import VisionOptions, converted, of_model, of_vision
from jaxis.models.common.towers.positions import Positions, learned
from jaxis.models.common.towers.projector import Projection
from jaxis.models.common.towers.siglip import PROJECTOR
from jaxis.models.common.towers.tower import VisionTower


class FeatureScale(JaxModule):
    """A factor for each feature."""

    def __init__(self, scope: LayerScope, options: VisionOptions) -> None:
        self.weight = parameter(scope, options.hidden_size)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.weight[...] * x


class InternVLVision(VisionTower):
    names = CheckpointNames(
        (
            *(("vision_tower", "tower"), ("tower.embeddings.patch_embeddings.projection", "tower.patch_embed")),
            ("tower.embeddings.position_embeddings", "tower.position_embed.weight"),
            *(("tower.embeddings.cls_token", "tower.class_token"), ("tower.encoder.layer", "tower.layers")),
            *(("layernorm_before", "norm1"), ("layernorm_after", "norm2"), ("attention", "attn")),
            *(("lambda_1", "after_attn.weight"), ("lambda_2", "after_mlp.weight")),
            *(("attn.projection_layer", "attn.o_proj"), PROJECTOR, ("projector.layer_norm", "projector.pre_norm")),
        )
    )
    vision = VisionOptions(
        *(1024, 4096, 24, 16, 14, "gelu"),
        merge_size=converted(of_model("downsample_ratio", 0.5), lambda ratio: int(1 / ratio)),
        make_norm=converted(
            of_vision("norm_type", "layer_norm"), lambda name: rms_norm if name == "rms_norm" else layer_norm
        ),
        epsilon=of_vision("layer_norm_eps", 1e-6),
        patch_bias=True,
        positions=Positions(learned, (1,), image_size=448, class_place=0),
        class_shape=(1, 1),
        qkv_bias=of_vision("attention_bias", False),
        qk_norm_epsilon=converted(of_vision("use_qk_norm", False), lambda is_normed: 1e-6 if is_normed else None),
        norms_all_heads=True,
        make_after=FeatureScale,
        expected={
            "model_type": ("internvl_vision",),
            **dict.fromkeys(("hidden_dropout_prob", "projection_dropout"), (0.0,)),
            **{"use_mean_pooling": (True,), "use_mask_token": (False,), "use_absolute_position_embeddings": (True,)},
        },
        ignored={"layer_scale_init_value": "the checkpoint has the scales"},
        expected_outside={"vision_feature_layer": (-1,), "vision_feature_select_strategy": ("default",)},
    )
    make_projector = Projection(make_norm=layer_norm, norms_merged=True)
