"""Image encoder of GLM-4.1V and 4.5V (arXiv:2507.01006), of GLM-OCR and of GLM-5.3-Flash."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax

from jaxis.config.hf_config import HFConfig
from jaxis.layers.checkpoint_names import CheckpointNames
from jaxis.layers.glu import GLU, LimitedGLU
from jaxis.layers.leaves import layer_norm, linear, rms_norm
from jaxis.layers.mlp import GatedMLP, activation_function
from jaxis.layers.module import JaxModule
from jaxis.layers.scope import LayerScope
from jaxis.models.common.towers.layers import PatchConvolution, merged
from jaxis.models.common.towers.options import VisionOptions, converted, of_vision, resolved
from jaxis.models.common.towers.positions import Positions, stretched_positions
from jaxis.models.common.towers.qwen import QWEN, QWEN_NAMES, QwenVision, qwen_layers

_SHARED: Mapping[str, Any] = {
    **QWEN,
    **{"make_norm": rms_norm, "epsilon": of_vision("rms_norm_eps", 1e-5), "is_gated": True, "patch_bias": True},
}


class GlmProjector(JaxModule):
    """A convolution that merges neighbours, then a product and a gated block of `inner_size`, limited if `limit` says.

    The gated block with a `limit` is that of `LimitedGLU`, whose activation is SiLU.
    """

    def __init__(
        self, scope: LayerScope, options: VisionOptions, size: int, inner_size: int, limit: float | None = None
    ) -> None:
        self.num_merged = options.num_merged
        size, inner_size, limit = resolved((size, inner_size, limit), scope.config)
        into, out = ("mlp", "embed"), ("embed", "mlp")
        self.downsample = PatchConvolution(
            scope / "downsample", size, options.merge_size, channels=options.hidden_size, use_bias=True
        )
        self.proj = linear(scope / "proj", size, size, axes=(None, None))
        self.post_projection_norm = layer_norm(scope, size, epsilon=1e-5)
        self.gelu, act = activation_function("gelu"), activation_function(options.activation)
        self.unit = GLU(act) if limit is None else LimitedGLU(limit)
        self.gate_proj = linear(scope / "gate_proj", size, inner_size, axes=into)
        self.up_proj = linear(scope / "up_proj", size, inner_size, axes=into)
        self.down_proj = linear(scope / "down_proj", inner_size, size, axes=out)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [P, C] -> [P / merge_size ** 2, E]."""
        x = self.proj(self.downsample(merged(x, self.num_merged)))
        x = self.gelu(self.post_projection_norm(x))
        return self.down_proj(self.unit(self.gate_proj(x), self.up_proj(x)))


class GlmVision(QwenVision):
    names = CheckpointNames(
        (
            *(*QWEN_NAMES, ("tower.downsample", "projector.downsample")),
            ("tower.embeddings.position_embedding", "tower.position_embed"),
            *(("tower.post_conv_layernorm", "tower.patch_norm"), ("tower.post_layernorm", "tower.post_norm")),
        )
    )

    vision = VisionOptions(
        *(1536, of_vision("out_hidden_size", 4096), *qwen_layers(24, 12), 14, "silu"),
        positions=Positions(partial(stretched_positions, is_cubic=True), image_size=336),
        norms=("patch_norm", "post_norm"),
        qkv_bias=of_vision("attention_bias", False),
        out_bias=False,
        **_SHARED,
    )
    make_projector = partial(
        GlmProjector, size=of_vision("out_hidden_size", 4096), inner_size=of_vision("intermediate_size", 13696)
    )


class GlmOcrVision(GlmVision):
    """The vision tower of GLM-OCR, with norms on heads and no table of positions."""

    vision = VisionOptions(
        *(1024, 4096, *qwen_layers(24, 16), 14, "silu"),
        norms=("post_norm",),
        qkv_bias=of_vision("attention_bias", True),
        out_bias=of_vision("attention_bias", True),
        mlp_bias=of_vision("attention_bias", True),
        qk_norm_epsilon=of_vision("rms_norm_eps", 1e-5),
        **{**_SHARED, "ignored": {**QWEN["ignored"], "image_size": "there is no table of positions"}},
    )
    make_projector = partial(
        GlmProjector,
        size=of_vision("out_hidden_size", 1536),
        inner_size=converted(of_vision("out_hidden_size", 1536), lambda size: 3 * size),
    )


def _limited_mlp(scope: LayerScope, options: VisionOptions) -> GatedMLP:
    unit = LimitedGLU(scope.config.get("swiglu_limit", 10.0))
    return GatedMLP(scope, intermediate_size=options.intermediate_size, gated_unit=unit, use_bias=options.mlp_bias)


class Glm5NextVision(GlmOcrVision):
    """The vision tower of GLM-5.3-Flash: GLM-OCR's with limited units; the text has no RoPE."""

    vision = dataclasses.replace(GlmOcrVision.vision, make_mlp=_limited_mlp, expected={"hidden_act": ("silu",)})
    make_projector = partial(
        GlmProjector,
        size=of_vision("out_hidden_size", 1536),
        inner_size=of_vision("projection_intermediate_size", 10240),
        limit=of_vision("swiglu_limit", 10.0),
    )

    @classmethod
    def check_rope(cls, config: HFConfig) -> None:
        """Accepts any rope, or none."""
