"""Image encoder of GLM-4.1V and 4.5V (arXiv:2507.01006), and of GLM-OCR."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax

from jaxis.config.hf_config import HFConfig
from jaxis.layers.checkpoint_names import CheckpointNames
from jaxis.layers.leaves import layer_norm, linear, rms_norm
from jaxis.layers.mlp import activation_function
from jaxis.layers.module import JaxModule
from jaxis.layers.scope import LayerScope
from jaxis.models.common.qwen_vision import QWEN, QWEN_NAMES, QwenVision, qwen_options
from jaxis.models.common.vision_layers import PatchConvolution, merged, num_places
from jaxis.models.common.vision_positions import Positions, stretched_positions
from jaxis.models.common.vision_transformer import VisionOptions

_BICUBIC = partial(stretched_positions, is_cubic=True)
_SHARED: dict[str, Any] = {**QWEN, "make_norm": rms_norm, "epsilon": 1e-5, "is_gated": True, "patch_bias": True}
_GLM = VisionOptions(
    *(1536, 4096, 24, 12, 14, "silu"), norms=("patch_norm", "post_norm"), qkv_bias=False, out_bias=False, **_SHARED
)
_GLM_OCR = VisionOptions(
    *(1024, 4096, 24, 16, 14, "silu"), norms=("post_norm",), mlp_bias=True, qk_norm_epsilon=1e-5, **_SHARED
)


class GlmProjector(JaxModule):
    """A convolution that merges neighbours, then a product and a gated block of `inner_size`."""

    def __init__(self, scope: LayerScope, options: VisionOptions, size: int, inner_size: int) -> None:
        self.num_merged = options.num_merged
        into, out = ("mlp", "embed"), ("embed", "mlp")
        self.downsample = PatchConvolution(
            scope / "downsample", size, options.merge_size, channels=options.hidden_size, use_bias=True
        )
        self.proj = linear(scope / "proj", size, size, axes=(None, None))
        self.post_projection_norm = layer_norm(scope, size, epsilon=1e-5)
        self.gelu, self.act = activation_function("gelu"), activation_function(options.activation)
        self.gate_proj = linear(scope / "gate_proj", size, inner_size, axes=into)
        self.up_proj = linear(scope / "up_proj", size, inner_size, axes=into)
        self.down_proj = linear(scope / "down_proj", inner_size, size, axes=out)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [P, C] -> [P / merge_size ** 2, E]."""
        x = self.proj(self.downsample(merged(x, self.num_merged)))
        x = self.gelu(self.post_projection_norm(x))
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class GlmVision(QwenVision):
    names = CheckpointNames(
        (
            *(*QWEN_NAMES, ("tower.downsample", "projector.downsample")),
            ("tower.embeddings.position_embedding", "tower.position_embed"),
            *(("tower.post_conv_layernorm", "tower.patch_norm"), ("tower.post_layernorm", "tower.post_norm")),
        )
    )

    @classmethod
    def options(cls, config: HFConfig) -> VisionOptions:
        vision = config["vision_config"]
        keys = {"epsilon": "rms_norm_eps", "intermediate_size": "out_hidden_size", "qkv_bias": "attention_bias"}
        options = qwen_options(vision, _GLM, **keys)
        positions = Positions((num_places(vision, 336, options.patch_size),), _BICUBIC)
        return dataclasses.replace(options, positions=positions)

    @classmethod
    def make_projector(cls, scope: LayerScope, options: VisionOptions) -> GlmProjector:
        vision = scope.config["vision_config"]
        return GlmProjector(scope, options, options.intermediate_size, vision.get("intermediate_size", 13696))


class GlmOcrVision(GlmVision):
    """The vision tower of GLM-OCR, with norms on heads and no table of positions."""

    @classmethod
    def options(cls, config: HFConfig) -> VisionOptions:
        vision = config["vision_config"]
        vision.ignore("image_size", because="there is no table of positions")
        keys = {"epsilon": "rms_norm_eps", "qk_norm_epsilon": "rms_norm_eps", "qkv_bias": "attention_bias"}
        return qwen_options(vision, _GLM_OCR, **keys, out_bias="attention_bias", mlp_bias="attention_bias")

    @classmethod
    def make_projector(cls, scope: LayerScope, options: VisionOptions) -> GlmProjector:
        size = scope.config["vision_config"].get("out_hidden_size", 1536)
        return GlmProjector(scope, options, size, 3 * size)
