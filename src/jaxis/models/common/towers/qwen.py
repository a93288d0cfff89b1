"""Image encoders of Qwen2-VL (arXiv:2409.12191), Qwen2.5-VL (arXiv:2502.13923), Qwen3-VL, and base of related ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxis.config.hf_config import HFConfig
from jaxis.errors import ConfigError
from jaxis.layers.checkpoint_names import CheckpointNames
from jaxis.layers.leaves import layer_norm, rms_norm
from jaxis.layers.scope import LayerScope
from jaxis.models.common.qwen import QWEN3_VL_MROPE
from jaxis.models.common.towers.options import Make, VisionOptions, of_vision
from jaxis.models.common.towers.patches import Patches
from jaxis.models.common.towers.positions import AxialRope, Positions, stretched_positions
from jaxis.models.common.towers.projector import JOINED, Projection
from jaxis.models.common.towers.tower import VisionTower
from jaxis.models.common.towers.transformer import frame_convolution

QWEN_NAMES = (
    *(("visual", "tower"), ("tower.merger", "projector"), ("tower.patch_embed.proj", "tower.patch_embed")),
    *(("tower.blocks", "tower.layers"), ("attn.proj", "attn.o_proj")),
)
QWEN: Mapping[str, Any] = {
    "num_kv_heads": of_vision("num_key_value_heads", None),
    "merge_size": of_vision("spatial_merge_size", 2),
    "num_frames": of_vision("temporal_patch_size", 2),
    "embed_patches": frame_convolution,
    "packs_qkv": True,
    "rope": AxialRope(theta=10_000.0),
    "ignored": dict.fromkeys(("model_type", "spatial_patch_size"), "it says again what the class says"),
}
"""Options that Qwen's towers share."""


def qwen_layers(num_layers: int, num_heads: int) -> tuple[int, int]:
    """Declares the number of layers and heads, with Qwen's keys."""
    return of_vision("depth", num_layers), of_vision("num_heads", num_heads)


_MERGER = Projection(
    size=of_vision("out_hidden_size", 3584),
    inner_sizes=(JOINED,),
    activation="gelu",
    make_norm=layer_norm,
    epsilon=1e-6,
)


class QwenVision(VisionTower):
    """Base of Qwen's vision towers, and of towers whose images RoPE counts by row and column as Qwen's.

    Attributes:
      is_interleaved: True if the text's pairs for time, row and column are interleaved.
      default_section: Default numbers of these pairs.
    """

    is_interleaved: ClassVar[bool] = False
    default_section: ClassVar[tuple[int, ...] | None] = None
    make_projector: ClassVar[Make] = _MERGER

    @classmethod
    def options(cls, config: HFConfig) -> VisionOptions:
        cls.check_rope(config)
        return super().options(config)

    @classmethod
    def check_rope(cls, config: HFConfig) -> None:
        """Raises a ConfigError if the text's RoPE does not count rows and columns as the family does."""
        settings: dict[str, Any] = {}
        for parent in (config, config.get_text_config()):
            for key in ("rope_scaling", "rope_parameters"):
                settings |= parent.read_object(key) or {}
        has_section = settings.get("mrope_section", cls.default_section) is not None
        is_interleaved = settings.get("mrope_interleaved", cls.is_interleaved and cls.default_section is not None)
        if not has_section or bool(is_interleaved) != cls.is_interleaved:
            raise ConfigError(
                f"{config.source}: images need mrope_section and mrope_interleaved={cls.is_interleaved} in the text's "
                "RoPE: correct the file, or leave the tower out with limit_mm_per_prompt={'image': 0, 'video': 0}"
            )


class Qwen2VLVision(QwenVision):
    names = CheckpointNames(
        (
            *(*QWEN_NAMES, ("projector.ln_q", "projector.pre_norm")),
            *(("projector.mlp.0", "projector.linear_1"), ("projector.mlp.2", "projector.linear_2")),
        ),
        other_names=(
            *(("visual.merger.norm", "visual.merger.ln_q"), ("visual.merger.linear_fc1", "visual.merger.mlp.0")),
            ("visual.merger.linear_fc2", "visual.merger.mlp.2"),
        ),
    )
    vision = VisionOptions(of_vision("embed_dim", 1280), 5120, *qwen_layers(32, 16), 14, "quick_gelu", **QWEN)
    make_projector = dataclasses.replace(_MERGER, size=of_vision("hidden_size", 3584))

    @classmethod
    def options(cls, config: HFConfig) -> VisionOptions:
        options = super().options(config)
        inner_size = int(options.hidden_size * config["vision_config"].get("mlp_ratio", 4))
        return dataclasses.replace(options, intermediate_size=inner_size)


class Qwen2_5VLVision(QwenVision):
    """The vision tower of Qwen2.5-VL, with windows in most layers."""

    names = Qwen2VLVision.names
    vision = VisionOptions(
        *(3584, 3420, *qwen_layers(32, 16), 14, "silu"),
        is_gated=True,
        make_norm=rms_norm,
        mlp_bias=True,
        whole_layers=of_vision("fullatt_block_indexes", (7, 15, 23, 31)),
        **QWEN,
    )
    make_projector = dataclasses.replace(_MERGER, make_norm=rms_norm)

    @classmethod
    def options(cls, config: HFConfig) -> VisionOptions:
        options = super().options(config)
        merged = config["vision_config"].get("window_size", 112) // options.merge_size // options.patch_size
        return dataclasses.replace(options, window_side=merged * options.merge_size)


class Exaone4_5Vision(Qwen2_5VLVision):
    """The vision tower of EXAONE 4.5: Qwen2.5-VL's with grouped-query attention; the text has a usual RoPE."""

    @classmethod
    def check_rope(cls, config: HFConfig) -> None:
        """Accepts any rope."""


class Qwen3_5Vision(QwenVision):
    """The vision tower of Qwen3.5: Qwen3-VL's, which may hand on the states of several layers (DeepStack).

    Attributes:
      default_deepstack: Layers whose states are handed on if the config does not name them.
    """

    prefixes = (*QwenVision.prefixes, "deepstack.")
    names = CheckpointNames(
        (
            *(("visual.deepstack_merger_list", "deepstack"), *QWEN_NAMES, ("tower.pos_embed", "tower.position_embed")),
            *(("mlp.linear_fc1", "mlp.fc1"), ("mlp.linear_fc2", "mlp.fc2")),
            *(("norm", "pre_norm"), ("linear_fc1", "linear_1"), ("linear_fc2", "linear_2")),
        )
    )
    vision = VisionOptions(
        *(1152, 4304, *qwen_layers(27, 16), 16, "gelu_pytorch_tanh"),
        patch_bias=True,
        positions=Positions(
            partial(stretched_positions, aligns_corners=True), (of_vision("num_position_embeddings", 2304),)
        ),
        **QWEN,
    )
    is_interleaved = True
    default_deepstack: ClassVar[tuple[int, ...]] = ()

    def add_parts(self, scope: LayerScope) -> None:
        self.num_additions = len(self.tower.options.outputs) - 1
        make = dataclasses.replace(_MERGER, norms_merged=True)
        self.deepstack = [make(scope / "deepstack" / str(i), self.tower.options) for i in range(self.num_additions)]

    @classmethod
    def options(cls, config: HFConfig) -> VisionOptions:
        options = super().options(config)
        deepstack = config["vision_config"].get("deepstack_visual_indexes", cls.default_deepstack)
        return dataclasses.replace(options, outputs=(options.num_layers, *(layer + 1 for layer in deepstack)))

    def __call__(self, patches: Patches) -> jax.Array:
        last, *others = self.tower(patches)
        deep = [projector(x) for projector, x in zip(self.deepstack, others, strict=True)]
        return jnp.concatenate([self.projector(last), *deep], axis=-1)


class Qwen3VLVision(Qwen3_5Vision):
    default_section = QWEN3_VL_MROPE
    default_deepstack = (8, 16, 24)
