"""Image encoder of GLM-4.1V and 4.5V (arXiv:2507.01006), and of GLM-OCR."""

from __future__ import annotations

import jax

from jaxis.kernels.weights import matmul
from jaxis.layers.leaves import layer_norm, linear, rms_norm
from jaxis.layers.mlp import GatedMLP, activation_function
from jaxis.layers.module import JaxModule
from jaxis.layers.scope import LayerScope
from jaxis.models.common.qwen_vision import (
    AxialTransformer,
    QwenPatchEmbed,
    QwenVision,
    QwenVisionAttention,
    QwenVisionBlock,
)
from jaxis.models.common.vision_layers import PositionTable, one_side, parameter, stretched_positions
from jaxis.models.common.vision_tower import Patches


class GlmVisionEmbeddings(JaxModule):
    """Embeddings of positions from a table [side ** 2, C] that is interpolated over the image (bicubic)."""

    def __init__(self, scope: LayerScope, side: int, num_features: int) -> None:
        self.side = side
        self.position_embedding = PositionTable(scope / "position_embedding", side * side, num_features)

    def __call__(self, patches: Patches) -> jax.Array:
        """Patches -> [P, C]."""
        table = self.position_embedding.weight[...]
        return stretched_positions(table.reshape(self.side, self.side, -1), patches, is_cubic=True)


class GlmDownsample(JaxModule):
    """A convolution that merges neighbouring patches, `merge_size` of a side."""

    def __init__(self, scope: LayerScope, num_features: int, size: int, merge_size: int) -> None:
        self.weight, self.bias = parameter(scope, size, num_features, merge_size, merge_size), parameter(scope, size)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [P, C], merged patches next to each other -> [P / merge_size ** 2, E]."""
        kernels = self.weight[...]
        flat = kernels.transpose(0, 2, 3, 1).reshape(kernels.shape[0], -1)
        return matmul(x.reshape(-1, flat.shape[1]), flat) + self.bias[...]


class GlmMerger(JaxModule):
    def __init__(self, scope: LayerScope, size: int, inner_size: int) -> None:
        activation = scope.config.get("hidden_act", "silu")
        into, out = ("mlp", "embed"), ("embed", "mlp")
        self.proj = linear(scope / "proj", size, size, axes=(None, None))
        self.post_projection_norm = layer_norm(scope, size, epsilon=1e-5)
        self.gelu, self.act = activation_function("gelu"), activation_function(activation)
        self.gate_proj = linear(scope / "gate_proj", size, inner_size, axes=into)
        self.up_proj = linear(scope / "up_proj", size, inner_size, axes=into)
        self.down_proj = linear(scope / "down_proj", inner_size, size, axes=out)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [N, E] -> [N, E]."""
        x = self.gelu(self.post_projection_norm(self.proj(x)))
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class GlmVisual(AxialTransformer):
    """The vision transformer, with its merger; GLM-OCR's has norms on heads and no table of positions."""

    def __init__(self, scope: LayerScope, *, is_ocr: bool = False) -> None:
        config = scope.config
        num_features = config.get("hidden_size", 1024 if is_ocr else 1536)
        super().__init__(scope, num_features, 14, num_heads=16 if is_ocr else 12)
        config.expect("attention_dropout", 0.0)
        size: int = config.get("out_hidden_size", 1536 if is_ocr else 4096)
        inner: int = config.get("intermediate_size", 4096 if is_ocr else 13696)
        epsilon = config.get("rms_norm_eps", 1e-5)
        self.patch_embed = QwenPatchEmbed(scope / "patch_embed", num_features, self.patch_size, use_bias=True)
        self.embeddings = self.post_conv_layernorm = None
        if is_ocr:
            config.ignore("image_size", because="there is no table of positions")
        else:
            side = one_side(config.get("image_size", 336), config.source) // self.patch_size
            self.embeddings = GlmVisionEmbeddings(scope / "embeddings", side, num_features)
            self.post_conv_layernorm = rms_norm(scope, num_features, epsilon=epsilon)
        use_bias, activation = config.get("attention_bias", is_ocr), config.get("hidden_act", "silu")
        self.blocks = [
            QwenVisionBlock(
                each,
                num_features,
                rms_norm,
                epsilon,
                attn=QwenVisionAttention(
                    each / "attn",
                    num_features,
                    self.num_heads,
                    qkv_bias=use_bias,
                    use_bias=use_bias and is_ocr,
                    norm_epsilon=epsilon if is_ocr else None,
                ),
                mlp=GatedMLP(
                    each / "mlp",
                    intermediate_size=inner if is_ocr else size,
                    activation=activation,
                    use_bias=use_bias and is_ocr,
                ),
            )
            for each in (scope / "blocks" / str(i) for i in range(config.get("depth", 24)))
        ]
        self.post_layernorm = rms_norm(scope, num_features, epsilon=epsilon)
        self.downsample = GlmDownsample(scope / "downsample", num_features, size, self.merge_size)
        self.merger = GlmMerger(scope / "merger", size, 3 * size if is_ocr else inner)

    def __call__(self, patches: Patches) -> jax.Array:
        """Patches -> [P / merge_size ** 2, E]."""
        x = self.patch_embed.proj(patches.pixels)
        if self.embeddings is not None and self.post_conv_layernorm is not None:
            x = self.post_conv_layernorm(x)
            x = x + self.embeddings(patches).astype(x.dtype)
        return self.merger(self.downsample(self.post_layernorm(self.through_blocks(x, patches)[-1])))


class GlmVision(QwenVision):
    make_visual = GlmVisual


def _ocr_visual(scope: LayerScope) -> GlmVisual:
    return GlmVisual(scope, is_ocr=True)


class GlmOcrVision(QwenVision):
    make_visual = staticmethod(_ocr_visual)
