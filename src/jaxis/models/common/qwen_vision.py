"""Image encoders of Qwen2-VL (arXiv:2409.12191), Qwen2.5-VL (arXiv:2502.13923), Qwen3-VL, and base of related ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxis.config import VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.errors import ConfigError
from jaxis.layers.checkpoint_names import CheckpointNames
from jaxis.layers.leaves import rms_norm
from jaxis.layers.scope import LayerScope
from jaxis.models.common.qwen import QWEN3_VL_MROPE
from jaxis.models.common.vision_positions import AxialRope, Positions, stretched_positions
from jaxis.models.common.vision_projector import VisionProjector
from jaxis.models.common.vision_tower import Patches
from jaxis.models.common.vision_transformer import TransformerTower, VisionOptions, frame_convolution

QWEN_NAMES = (
    *(("visual", "tower"), ("tower.merger", "projector"), ("tower.patch_embed.proj", "tower.patch_embed")),
    *(("tower.blocks", "tower.layers"), ("attn.proj", "attn.o_proj")),
)
QWEN: Mapping[str, Any] = {
    **{"merge_size": 2, "num_frames": 2, "embed_patches": frame_convolution, "packs_qkv": True},
    "rope": AxialRope(theta=10_000.0),
}
"""Options that Qwen's towers share."""
_QWEN2 = VisionOptions(1280, 5120, 32, 16, 14, "quick_gelu", **QWEN)
_QWEN2_5 = VisionOptions(
    *(3584, 3420, 32, 16, 14, "silu"),
    make_norm=rms_norm,
    is_gated=True,
    mlp_bias=True,
    whole_layers=(7, 15, 23, 31),
    **QWEN,
)
_QWEN3 = VisionOptions(1152, 4304, 27, 16, 16, "gelu_pytorch_tanh", patch_bias=True, **QWEN)
_INTERPOLATED = partial(stretched_positions, aligns_corners=True)


def qwen_options(vision: HFConfig, defaults: VisionOptions, **keys: str) -> VisionOptions:
    """Reads a `vision_config` with Qwen's keys, and others for further options.

    Raises:
      ConfigError: A setting is not supported.
    """
    of_qwen = {"num_layers": "depth", "num_heads": "num_heads", "num_kv_heads": "num_key_value_heads"}
    of_qwen |= {"merge_size": "spatial_merge_size", "num_frames": "temporal_patch_size"}
    for key in ("model_type", "spatial_patch_size"):
        vision.ignore(key, because="it says again what the class says")
    return defaults.read(vision, **of_qwen | keys)


def qwen_projector(scope: LayerScope, options: VisionOptions, size: int, **norm: Any) -> VisionProjector:
    """Creates a projector to `size` features, with a norm over patches unless `norm` says otherwise."""
    of_qwen = {
        "inner_sizes": (options.merged_size,),
        "activation": "gelu",
        "make_norm": options.make_norm,
        "epsilon": 1e-6,
    }
    return VisionProjector(scope, options, size, **of_qwen | norm)


class QwenVision(TransformerTower):
    """Base of Qwen's vision towers, and of towers whose images RoPE counts by row and column as Qwen's.

    Attributes:
      is_interleaved: True if the text's pairs for time, row and column are interleaved.
      default_section: Default numbers of these pairs.
      size_key: Key of a `vision_config` for E.
    """

    is_interleaved: ClassVar[bool] = False
    default_section: ClassVar[tuple[int, ...] | None] = None
    size_key: ClassVar[str] = "out_hidden_size"

    def __init__(self, vllm_config: VllmConfig, rng: nnx.Rngs) -> None:
        self.check_rope(vllm_config.model_config.hf_config)
        super().__init__(vllm_config, rng)

    @classmethod
    def make_projector(cls, scope: LayerScope, options: VisionOptions) -> VisionProjector:
        return qwen_projector(scope, options, scope.config["vision_config"].get(cls.size_key, 3584))

    def check_rope(self, config: HFConfig) -> None:
        """Raises a ConfigError if the text's RoPE does not count rows and columns as the family does."""
        settings: dict[str, Any] = {}
        for parent in (config, config.get_text_config()):
            for key in ("rope_scaling", "rope_parameters"):
                settings |= parent.read_object(key) or {}
        has_section = settings.get("mrope_section", self.default_section) is not None
        is_interleaved = settings.get("mrope_interleaved", self.is_interleaved and self.default_section is not None)
        if not has_section or bool(is_interleaved) != self.is_interleaved:
            raise ConfigError(
                f"{config.source}: images need mrope_section and mrope_interleaved={self.is_interleaved} in the text's "
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
    size_key = "hidden_size"

    @classmethod
    def options(cls, config: HFConfig) -> VisionOptions:
        vision = config["vision_config"]
        options = qwen_options(vision, _QWEN2, hidden_size="embed_dim")
        inner_size = int(options.hidden_size * vision.get("mlp_ratio", 4))
        return dataclasses.replace(options, intermediate_size=inner_size)


class Qwen2_5VLVision(QwenVision):
    """The vision tower of Qwen2.5-VL, with windows in most layers."""

    names = Qwen2VLVision.names

    @classmethod
    def options(cls, config: HFConfig) -> VisionOptions:
        vision = config["vision_config"]
        options = qwen_options(vision, _QWEN2_5, whole_layers="fullatt_block_indexes")
        merged = vision.get("window_size", 112) // options.merge_size // options.patch_size
        return dataclasses.replace(options, window_side=merged * options.merge_size)


class Exaone4_5Vision(Qwen2_5VLVision):
    """The vision tower of EXAONE 4.5: Qwen2.5-VL's with grouped-query attention; the text has a usual RoPE."""

    def check_rope(self, config: HFConfig) -> None:
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
    is_interleaved = True
    default_deepstack: ClassVar[tuple[int, ...]] = ()

    def __init__(self, vllm_config: VllmConfig, rng: nnx.Rngs) -> None:
        super().__init__(vllm_config, rng)
        scope = LayerScope(vllm_config, rng, vllm_config.quant_config, names=self.checkpoint_names)
        options, size = self.tower.options, scope.config["vision_config"].get(self.size_key, 3584)
        self.num_additions = len(options.outputs) - 1
        self.deepstack = [
            qwen_projector(scope / "deepstack" / str(i), options, size, norms_merged=True)
            for i in range(self.num_additions)
        ]

    @classmethod
    def options(cls, config: HFConfig) -> VisionOptions:
        vision = config["vision_config"]
        options = qwen_options(vision, _QWEN3)
        deepstack = vision.get("deepstack_visual_indexes", cls.default_deepstack)
        return dataclasses.replace(
            options,
            positions=Positions((vision.get("num_position_embeddings", 2304),), _INTERPOLATED),
            outputs=(options.num_layers, *(layer + 1 for layer in deepstack)),
        )

    def __call__(self, patches: Patches) -> jax.Array:
        last, *others = self.tower(patches)
        deep = [projector(x) for projector, x in zip(self.deepstack, others, strict=True)]
        return jnp.concatenate([self.projector(last), *deep], axis=-1)


class Qwen3VLVision(Qwen3_5Vision):
    default_section = QWEN3_VL_MROPE
    default_deepstack = (8, 16, 24)
