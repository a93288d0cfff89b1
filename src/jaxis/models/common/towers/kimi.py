"""Image encoders of Kimi K2.5 to K2.7, and K3: MoonViT (arXiv:2504.07491), joined neighbours, a projector."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp

from jaxis.config.hf_config import HFConfig
from jaxis.layers.checkpoint_names import CheckpointNames
from jaxis.layers.leaves import layer_norm, rms_norm
from jaxis.layers.scope import LayerScope
from jaxis.models.common.towers.layers import VisionMLP
from jaxis.models.common.towers.options import VisionOptions, of_model, of_vision
from jaxis.models.common.towers.positions import AxialRope, Positions, rotate_pairs, stretched_positions
from jaxis.models.common.towers.projector import JOINED, Projection, VisionProjector
from jaxis.models.common.towers.tower import VisionTower

_SIDE = of_vision("init_pos_emb_height", of_vision("pos_emb_height", 64))


def _published(name: str, default: int) -> int:
    """Declares an option by the published key, or by that which transformers writes."""
    return of_vision(f"vt_{name}", of_vision(name, default))


class KimiVision(VisionTower):
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
    vision = VisionOptions(
        *(_published("hidden_size", 1152), _published("intermediate_size", 4304)),
        *(_published("num_hidden_layers", 27), _published("num_attention_heads", 16), 14, "gelu_pytorch_tanh"),
        merge_size=of_vision("merge_kernel_size", 2),
        epsilon=1e-5,
        patch_bias=True,
        positions=Positions(partial(stretched_positions, is_cubic=True), (_SIDE, _SIDE)),
        norms=("post_norm",),
        packs_qkv=True,
        rope=AxialRope(theta=10_000.0, rotate=rotate_pairs, columns_first=True, alternates=True),
        expected={
            **{"pos_emb_type": ("divided_fixed",), "merge_type": ("sd2_tpool",), "mm_projector_type": ("patchmerger",)},
            **{"init_pos_emb_width": (_SIDE,), "pos_emb_width": (_SIDE,)},
            "mm_hidden_size": lambda options: options.hidden_size,
        },
        ignored=dict.fromkeys(
            ("video_attn_type", "init_pos_emb_time", "pos_emb_time", "model_type", "text_hidden_size"),
            "it is about video, or says again what is said elsewhere",
        ),
        expected_outside={"projection_hidden_size": lambda options: options.hidden_size},
    )
    make_projector = Projection(
        inner_sizes=(JOINED,),
        activation=of_vision("projector_hidden_act", "gelu"),
        make_norm=layer_norm,
        epsilon=of_vision("projector_ln_eps", of_model("projection_layer_norm_eps", 1e-5)),
    )


def _mlp_without_bias(scope: LayerScope, options: VisionOptions) -> VisionMLP:
    return VisionMLP(scope, options.hidden_size, options.intermediate_size, options.activation, use_bias=False)


class KimiK3Projector(VisionProjector):
    """Two products of joined neighbours, and a norm."""

    def __init__(self, scope: LayerScope, options: VisionOptions) -> None:
        activation = of_vision("projector_hidden_act", "gelu")
        super().__init__(scope, options, Projection(inner_sizes=(JOINED,), activation=activation, use_bias=False))
        epsilon = scope.config["vision_config"].get("projector_ln_eps", 1e-5)
        self.post_norm = rms_norm(scope, scope.config["text_config"]["hidden_size"], epsilon=epsilon)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.post_norm(super().__call__(x))


class KimiK3Vision(KimiVision):
    vision = dataclasses.replace(
        KimiVision.vision,
        epsilon=float(jnp.finfo(jnp.float32).eps),  # the files name none, and PyTorch takes this
        make_norm=rms_norm,
        patch_bias=False,
        qkv_bias=False,
        out_bias=False,
        make_mlp=_mlp_without_bias,
        positions=Positions(stretched_positions, (_SIDE, _SIDE)),
        expected={
            **KimiVision.vision.expected,
            **{"mm_projector_type": ("patchmergerv2",), "pos_emb_interpolation_mode": ("bilinear",)},
            **{"norm_type": ("rmsnorm",), "mlp_type": ("mlp2",), "activation_func": ("gelu_pytorch_tanh",)},
            **dict.fromkeys(("attn_bias", "linear_bias", "patch_embed_proj_bias"), (False,)),
        },
        expected_outside={},
    )
    make_projector = KimiK3Projector

    @classmethod
    def options(cls, config: HFConfig) -> VisionOptions:
        options, vision = super().options(config), config["vision_config"]
        size = vision.get("qkv_hidden_size", options.hidden_size)
        if size % options.num_heads:
            raise vision.fault("qkv_hidden_size", why=f"expected a multiple of the {options.num_heads} heads")
        return dataclasses.replace(options, head_size=size // options.num_heads)
