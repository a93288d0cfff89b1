"""Image encoder of InternVL (arXiv:2504.10479): InternViT, joined neighbours, a projector."""

from __future__ import annotations

import dataclasses
import functools

import jax

from jaxis.config.hf_config import HFConfig
from jaxis.layers.checkpoint_names import CheckpointNames
from jaxis.layers.leaves import layer_norm, rms_norm
from jaxis.layers.module import JaxModule
from jaxis.layers.scope import LayerScope
from jaxis.models.common.siglip import PROJECTOR
from jaxis.models.common.vision_layers import num_places, parameter
from jaxis.models.common.vision_positions import Positions, learned
from jaxis.models.common.vision_projector import VisionProjector
from jaxis.models.common.vision_transformer import TransformerTower, VisionOptions


class FeatureScale(JaxModule):
    """A factor for each feature."""

    def __init__(self, scope: LayerScope, options: VisionOptions) -> None:
        self.weight = parameter(scope, options.hidden_size)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.weight[...] * x


_DEFAULTS = VisionOptions(1024, 4096, 24, 16, 14, "gelu", patch_bias=True, qkv_bias=False)


def internvit_options(vision: HFConfig, merge_size: int) -> VisionOptions:
    """Reads a `vision_config` of InternViT. Raises ConfigError if a setting is not supported."""
    keys = {"epsilon": "layer_norm_eps", "qkv_bias": "attention_bias"}
    options = _DEFAULTS.read(vision, "internvl_vision", **keys)
    for key in ("hidden_dropout_prob", "projection_dropout"):
        vision.expect(key, 0.0)
    vision.expect("use_mean_pooling", True)
    vision.expect("use_mask_token", False)
    vision.expect("use_absolute_position_embeddings", True)
    vision.ignore("layer_scale_init_value", because="the checkpoint has the scales")
    return dataclasses.replace(
        options,
        merge_size=merge_size,
        class_shape=(1, 1, options.hidden_size),
        positions=Positions((1, num_places(vision, 448, options.patch_size) + 1), learned, class_place=0),
        make_norm=rms_norm if vision.get("norm_type", "layer_norm") == "rms_norm" else layer_norm,
        qk_norm_epsilon=1e-6 if vision.get("use_qk_norm", False) else None,
        norms_all_heads=True,
        make_after=FeatureScale,
    )


class InternVLVision(TransformerTower):
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

    make_projector = functools.partial(VisionProjector, make_norm=layer_norm, norms_merged=True)

    @classmethod
    def options(cls, config: HFConfig) -> VisionOptions:
        config.expect("vision_feature_layer", -1)
        config.expect("vision_feature_select_strategy", "default")
        return internvit_options(config["vision_config"], int(1 / config.get("downsample_ratio", 0.5)))
