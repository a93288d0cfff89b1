"""Image encoder of Kimi K2.5 to K2.7: MoonViT (arXiv:2504.07491), joined neighbours, a projector."""

from __future__ import annotations

import dataclasses
from functools import partial

from jaxis.config.hf_config import HFConfig
from jaxis.layers.checkpoint_names import CheckpointNames
from jaxis.layers.leaves import layer_norm
from jaxis.layers.scope import LayerScope
from jaxis.models.common.vision_positions import (
    AxialRope,
    Positions,
    rotate_pairs,
    stretched_positions,
)
from jaxis.models.common.vision_projector import VisionProjector
from jaxis.models.common.vision_transformer import TransformerTower, VisionOptions

_ROPE = AxialRope(theta=10_000.0, rotate=rotate_pairs, columns_first=True, alternates=True)
_DEFAULTS = VisionOptions(
    *(1152, 4304, 27, 16, 14, "gelu_pytorch_tanh"),
    merge_size=2,
    patch_bias=True,
    norms=("post_norm",),
    epsilon=1e-5,
    packs_qkv=True,
    rope=_ROPE,
)
# Published keys, beside those that transformers writes.
_PUBLISHED = {
    **{"hidden_size": "vt_hidden_size", "intermediate_size": "vt_intermediate_size"},
    **{"num_layers": "vt_num_hidden_layers", "num_heads": "vt_num_attention_heads"},
}


def moonvit_options(vision: HFConfig) -> VisionOptions:
    """Reads a `vision_config` of MoonViT. Raises ConfigError if a setting is not supported."""
    for key, expected in (("pos_emb_type", "divided_fixed"), ("merge_type", "sd2_tpool")):
        vision.expect(key, expected)
    vision.expect("mm_projector_type", "patchmerger")
    for key in ("video_attn_type", "init_pos_emb_time", "pos_emb_time", "model_type", "text_hidden_size"):
        vision.ignore(key, because="it is about video, or says again what is said elsewhere")
    options = _DEFAULTS.read(vision, merge_size="merge_kernel_size").read(vision, **_PUBLISHED)
    side = vision.get("init_pos_emb_height", vision.get("pos_emb_height", 64))
    for key in ("init_pos_emb_width", "pos_emb_width"):
        vision.expect(key, side)
    return dataclasses.replace(options, positions=Positions((side, side), partial(stretched_positions, is_cubic=True)))


class KimiVision(TransformerTower):
    names = CheckpointNames(
        (
            *(("vision_tower", "tower"), ("tower.encoder.blocks", "tower.layers")),
            *(("tower.patch_embed.pos_emb", "tower.position_embed"), ("tower.patch_embed.proj", "tower.patch_embed")),
            *(("norm1", "norm2"), ("norm0", "norm1"), ("tower.encoder.final_layernorm", "tower.post_norm")),
            *(("mlp.fc1", "mlp.fc2"), ("mlp.fc0", "mlp.fc1"), ("wqkv", "attn.qkv"), ("wo", "attn.o_proj")),
            *(("mm_projector.proj.0", "mm_projector.in_proj"), ("mm_projector.proj.2", "mm_projector.out_proj")),
            *(("mm_projector", "projector"), ("in_proj", "linear_1"), ("out_proj", "linear_2")),
        )
    )

    @classmethod
    def options(cls, config: HFConfig) -> VisionOptions:
        vision = config["vision_config"]
        options = moonvit_options(vision)
        config.expect("projection_hidden_size", options.hidden_size)
        vision.expect("mm_hidden_size", options.hidden_size)
        return options

    @staticmethod
    def make_projector(scope: LayerScope, options: VisionOptions) -> VisionProjector:
        config, vision = scope.config, scope.config["vision_config"]
        return VisionProjector(
            scope,
            options,
            inner_sizes=(options.merged_size,),
            activation=vision.get("projector_hidden_act", "gelu"),
            make_norm=layer_norm,
            epsilon=vision.get("projector_ln_eps", config.get("projection_layer_norm_eps", 1e-5)),
        )
