"""Image encoders of Qwen2-VL (arXiv:2409.12191), Qwen2.5-VL (arXiv:2502.13923), Qwen3-VL, and base of related ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxis.errors import ConfigError
from jaxis.layers.checkpoint_names import CheckpointNames
from jaxis.layers.leaves import layer_norm, linear, rms_norm
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.module import JaxModule
from jaxis.layers.scope import LayerScope
from jaxis.models.common.qwen import QWEN3_VL_MROPE
from jaxis.models.common.vision_layers import (
    MakeNorm,
    PositionTable,
    VisionMLP,
    VisionProjector,
    Windows,
    attend_to_visible,
    axial_angles,
    axial_rope_theta,
    one_segment,
    one_side,
    parameter,
    patch_products,
    rotate_halves,
    run_layer,
    stretched_positions,
    vision_scope,
)
from jaxis.models.common.vision_tower import Patches, VisionTower

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.config.hf_config import HFConfig

MakeMLP = Callable[[LayerScope], VisionMLP | GatedMLP]

_EPSILON = 1e-6


class FrameConvolution(JaxModule):
    """A convolution over frames and pixels without overlap; an image counts as equal frames.

    A kernel has `num_frames` frames of `patch_size` pixels a side.
    """

    def __init__(
        self, scope: LayerScope, num_features: int, num_frames: int, patch_size: int, *, use_bias: bool
    ) -> None:
        self.weight = parameter(scope, num_features, 3, num_frames, patch_size, patch_size)
        self.bias = parameter(scope, num_features) if use_bias else None

    def __call__(self, pixels: jax.Array) -> jax.Array:
        """pixels [P, patch * patch * 3 * frames], channels last (of an image, [P, patch * patch * 3]) -> [P, C]."""
        return frame_products(pixels, self.weight[...], None if self.bias is None else self.bias[...])


class FlatFrameConvolution(JaxModule):
    """A `FrameConvolution` without a bias, whose kernels are rows of a matrix in checkpoints.

    With `has_frames_first`, a row has all channels of a frame together, otherwise all frames of a channel.
    """

    def __init__(
        self,
        scope: LayerScope,
        num_features: int,
        num_frames: int,
        patch_size: int,
        *,
        has_frames_first: bool = False,
    ) -> None:
        self.has_frames_first = has_frames_first
        self.shape = (num_frames, 3) if has_frames_first else (3, num_frames)
        self.patch_size = patch_size
        self.weight = parameter(scope, num_features, 3 * num_frames * patch_size**2)

    def __call__(self, pixels: jax.Array) -> jax.Array:
        """pixels as in `FrameConvolution` -> [P, C]."""
        kernels = self.weight[...].reshape(-1, *self.shape, self.patch_size, self.patch_size)
        return frame_products(pixels, kernels.swapaxes(1, 2) if self.has_frames_first else kernels, None)


def frame_products(pixels: jax.Array, kernels: jax.Array, bias: jax.Array | None) -> jax.Array:
    """`FrameConvolution` with kernels [C, 3, frames, patch, patch] and bias [C] or None -> [P, C]."""
    num_features, _, num_frames, *patch = kernels.shape
    if pixels.shape[-1] == 3 * math.prod(patch):
        kernels = jnp.sum(kernels.astype(jnp.float32), axis=2).astype(pixels.dtype)
    else:
        kernels = jnp.swapaxes(kernels, 1, 2).reshape(num_features, 3 * num_frames, *patch)
    return patch_products(pixels, kernels, bias)


class QwenPatchEmbed(JaxModule):
    """The convolution over patches of `patch_size` pixels a side."""

    def __init__(self, scope: LayerScope, num_features: int, patch_size: int, *, use_bias: bool) -> None:
        num_frames = scope.config.get("temporal_patch_size", 2)
        self.proj = FrameConvolution(scope / "proj", num_features, num_frames, patch_size, use_bias=use_bias)


class QwenVisionAttention(JaxModule):
    """Attention among an image's patches.

    Args:
      num_features: C.
      num_heads: H.
      num_kv_heads: K, which divides H; None means H.
      qkv_bias: True if queries, keys and values have biases.
      use_bias: True if the output has a bias.
      norm_epsilon: Epsilon of norms of queries and keys; None for no norms.
      rotate: Function that rotates x [P, H, D] by angles [P, D / 2].
    """

    def __init__(
        self,
        scope: LayerScope,
        num_features: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        qkv_bias: bool = True,
        use_bias: bool = True,
        norm_epsilon: float | None = None,
        rotate: Callable[[jax.Array, jax.Array], jax.Array] = rotate_halves,
    ) -> None:
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads or num_heads
        head_dim = num_features // num_heads
        size = head_dim * (num_heads + 2 * self.num_kv_heads)
        self.qkv = linear(scope / "qkv", num_features, size, axes=("heads", "embed"), use_bias=qkv_bias)
        self.proj = linear(scope / "proj", num_features, num_features, axes=("embed", "heads"), use_bias=use_bias)
        self.q_norm = None if norm_epsilon is None else rms_norm(scope, head_dim, epsilon=norm_epsilon)
        self.k_norm = None if norm_epsilon is None else rms_norm(scope, head_dim, epsilon=norm_epsilon)
        self.rotate = rotate

    def __call__(self, x: jax.Array, angles: jax.Array, visible: jax.Array | Windows) -> jax.Array:
        """x [P, C], angles [P, D / 2], visible: segments i32 [P] or windows -> [P, C]."""
        heads = self.qkv(x).reshape(x.shape[0], self.num_heads + 2 * self.num_kv_heads, -1)
        q, k, v = jnp.split(heads, [self.num_heads, self.num_heads + self.num_kv_heads], axis=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rotate(q, angles), self.rotate(k, angles)
        return self.proj(attend_to_visible(visible, q, k, v))


class QwenVisionBlock(JaxModule):
    """A pre-norm layer, with `layer_norm` or `rms_norm` as `make_norm`.

    `attn` is a `QwenVisionAttention` or a module that is called the same way.
    """

    def __init__(
        self,
        scope: LayerScope,
        num_features: int,
        make_norm: MakeNorm,
        epsilon: float,
        *,
        attn: Any,
        mlp: VisionMLP | GatedMLP,
    ) -> None:
        self.norm1 = make_norm(scope, num_features, epsilon=epsilon)
        self.norm2 = make_norm(scope, num_features, epsilon=epsilon)
        self.attn, self.mlp = attn, mlp

    def __call__(self, x: jax.Array, angles: jax.Array, visible: jax.Array | Windows) -> jax.Array:
        """x [P, C] -> [P, C]; arguments as in `QwenVisionAttention`."""
        x = x + self.attn(self.norm1(x), angles, visible)
        return x + self.mlp(self.norm2(x))


class AxialTransformer(JaxModule):
    """Layers over an image's patches with a rope by row and column; each family creates its own blocks.

    The constructor's sizes are used if the config does not say them.

    Attributes:
      patch_size: Pixels of a side of a patch.
      merge_size: Patches of a side of the square that becomes one embedding.
      num_frames, num_additions: Attributes of the `VisionTower`.
      num_heads, head_dim: H and D.
      blocks: Layers, each called with x [P, C], angles [P, D / 2] and its entry of `visible`.
    """

    num_additions = 0

    def __init__(self, scope: LayerScope, num_features: int, patch_size: int, *, num_heads: int = 16) -> None:
        config = scope.config
        config.expect("in_channels", 3)
        config.expect("in_chans", 3)
        for key in ("model_type", "tokens_per_second", "spatial_patch_size"):
            config.ignore(key, because="it is about video, or says again what the class says")
        self.rope_theta = axial_rope_theta(config, 10_000.0)
        self.num_heads: int = config.get("num_heads", num_heads)
        self.head_dim = num_features // self.num_heads
        self.patch_size = one_side(config.get("patch_size", patch_size), config.source)
        self.merge_size: int = config.get("spatial_merge_size", 2)
        self.num_frames: int = config.get("temporal_patch_size", 2)
        self.blocks: list[Any] = []

    def __call__(self, patches: Patches) -> jax.Array:
        """Patches -> [P / merge_size ** 2, E * (1 + num_additions)]."""
        raise NotImplementedError

    def through_blocks(self, x: jax.Array, patches: Patches) -> list[jax.Array]:
        """Output x [P, C] of the convolution -> the output [P, C] of each layer."""
        angles = axial_angles(patches, self.head_dim, self.rope_theta)
        outputs = []
        for block, visible in zip(self.blocks, self.visible(patches), strict=True):
            x = run_layer(block, x, angles, visible)
            outputs.append(x)
        return outputs

    def visible(self, patches: Patches) -> Sequence[jax.Array | Windows]:
        """Returns for each layer the segments i32 [P] or windows within which patches see each other."""
        return [one_segment(patches.rows.shape[0], patches.num_patches)] * len(self.blocks)


def _merger(
    scope: LayerScope, num_features: int, size: int, merge_size: int, make_norm: MakeNorm, *, norms_merged: bool = False
) -> VisionProjector:
    return VisionProjector(
        scope,
        num_features,
        size,
        num_merged=merge_size**2,
        inner_size=num_features * merge_size**2,
        activation="gelu",
        make_norm=make_norm,
        epsilon=_EPSILON,
        norms_merged=norms_merged,
    )


class QwenVisual(AxialTransformer):
    """The vision transformer, with its merger.

    Args:
      num_features: C.
      size: E.
      make_norm: Factory of the norms: `layer_norm` or `rms_norm`.
      make_mlp: Factory of the layers' feed-forward blocks.
      patch_size: Pixels of a side of a patch, if the config does not say.
      num_layers: Number of layers, if the config does not say.
      has_bias: True if the convolution has a bias.
    """

    def __init__(
        self,
        scope: LayerScope,
        num_features: int,
        size: int,
        make_norm: MakeNorm,
        make_mlp: MakeMLP,
        *,
        patch_size: int,
        has_bias: bool = False,
        num_layers: int,
    ) -> None:
        super().__init__(scope, num_features, patch_size)
        config = scope.config
        self.patch_embed = QwenPatchEmbed(scope / "patch_embed", num_features, self.patch_size, use_bias=has_bias)
        num_kv_heads = config.get("num_key_value_heads", self.num_heads)
        self.blocks = [
            QwenVisionBlock(
                each,
                num_features,
                make_norm,
                _EPSILON,
                attn=QwenVisionAttention(each / "attn", num_features, self.num_heads, num_kv_heads),
                mlp=make_mlp(each / "mlp"),
            )
            for each in (scope / "blocks" / str(i) for i in range(config.get("depth", num_layers)))
        ]
        self.merger = _merger(scope / "merger", num_features, size, self.merge_size, make_norm)

    def __call__(self, patches: Patches) -> jax.Array:
        """Patches -> [P / merge_size ** 2, E]."""
        return self.merger(self.through_blocks(self.patch_embed.proj(patches.pixels), patches)[-1])


class Qwen2_5Visual(QwenVisual):
    """The transformer of Qwen2.5-VL, with windows in most layers."""

    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        size = config.get("intermediate_size", 3420)
        activation = config.get("hidden_act", "silu")

        def make_mlp(scope: LayerScope) -> GatedMLP:
            return GatedMLP(scope, intermediate_size=size, activation=activation, use_bias=True)

        super().__init__(
            scope,
            config.get("hidden_size", 3584),
            config.get("out_hidden_size", 3584),
            rms_norm,
            make_mlp,
            patch_size=14,
            num_layers=32,
        )
        self.whole_layers = frozenset(config.get("fullatt_block_indexes", [7, 15, 23, 31]))
        merged = config.get("window_size", 112) // self.merge_size // self.patch_size
        self.window_side = merged * self.merge_size

    def visible(self, patches: Patches) -> Sequence[jax.Array | Windows]:
        windows = Windows.of(patches, self.window_side, self.merge_size)
        whole = super().visible(patches)
        return [whole[i] if i in self.whole_layers else windows for i in range(len(self.blocks))]


class Qwen3Visual(QwenVisual):
    """The transformer of Qwen3-VL: interpolated positions from a table, and features of several layers (DeepStack).

    `deepstack_layers` is for a config that does not name them.
    """

    def __init__(self, scope: LayerScope, deepstack_layers: tuple[int, ...] = (8, 16, 24)) -> None:
        config = scope.config
        num_features, size = config.get("hidden_size", 1152), config.get("out_hidden_size", 3584)
        inside = config.get("intermediate_size", 4304)
        activation = config.get("hidden_act", "gelu_pytorch_tanh")

        def make_mlp(scope: LayerScope) -> VisionMLP:
            return VisionMLP(scope, num_features, inside, activation)

        super().__init__(scope, num_features, size, layer_norm, make_mlp, patch_size=16, has_bias=True, num_layers=27)
        num_places = config.get("num_position_embeddings", 2304)
        self.table_side = math.isqrt(num_places)
        self.pos_embed = PositionTable(scope / "pos_embed", num_places, num_features)
        self.deepstack_layers = tuple(config.get("deepstack_visual_indexes", deepstack_layers))
        self.num_additions = len(self.deepstack_layers)
        self.deepstack_merger_list = [
            _merger(each, num_features, size, self.merge_size, layer_norm, norms_merged=True)
            for each in (scope / "deepstack_merger_list" / str(i) for i in range(len(self.deepstack_layers)))
        ]

    def __call__(self, patches: Patches) -> jax.Array:
        """Patches -> [P / merge_size ** 2, E * (1 + layers of DeepStack)]."""
        x = self.patch_embed.proj(patches.pixels)
        table = self.pos_embed.weight[...].reshape(self.table_side, self.table_side, -1)
        x = x + stretched_positions(table, patches, aligns_corners=True).astype(x.dtype)
        outputs = self.through_blocks(x, patches)
        deep = [merger(outputs[i]) for i, merger in zip(self.deepstack_layers, self.deepstack_merger_list, strict=True)]
        return jnp.concatenate([self.merger(outputs[-1]), *deep], axis=-1)


class QwenVision(VisionTower):
    """Base of Qwen's vision towers, and of towers whose images RoPE counts by row and column as Qwen's."""

    config_keys = (
        "vision_config",
        *(f"{parent}{key}" for parent in ("", "text_config.") for key in ("rope_scaling", "rope_parameters")),
    )
    prefixes = ("visual.",)
    names = CheckpointNames(
        (
            *(("mlp.linear_fc1", "mlp.fc1"), ("mlp.linear_fc2", "mlp.fc2")),
            # Names in mergers; the first line has those of Qwen2-VL and Qwen2.5-VL.
            *(("ln_q", "pre_norm"), ("merger.mlp.0", "merger.linear_1"), ("merger.mlp.2", "merger.linear_2")),
            *(("norm", "pre_norm"), ("linear_fc1", "linear_1"), ("linear_fc2", "linear_2")),
        )
    )
    make_visual: ClassVar[Callable[[LayerScope], AxialTransformer]]
    # True if the pairs for time, row and column are interleaved; below, their default numbers.
    is_interleaved: ClassVar[bool] = False
    default_section: ClassVar[tuple[int, ...] | None] = None

    def __init__(self, vllm_config: VllmConfig, rng: nnx.Rngs) -> None:
        scope = LayerScope(vllm_config, rng, vllm_config.quant_config)
        self._check_rope(scope.config)
        self.visual = type(self).make_visual(vision_scope(scope / "visual"))
        self.patch_size, self.merge_size = self.visual.patch_size, self.visual.merge_size
        self.num_frames, self.num_additions = self.visual.num_frames, self.visual.num_additions

    def __call__(self, patches: Patches) -> jax.Array:
        return self.visual(patches)

    def _check_rope(self, config: HFConfig) -> None:
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


def _qwen2_visual(scope: LayerScope) -> QwenVisual:
    config = scope.config
    num_features, ratio = config.get("embed_dim", 1280), config.get("mlp_ratio", 4)
    activation = config.get("hidden_act", "quick_gelu")

    def make_mlp(scope: LayerScope) -> VisionMLP:
        return VisionMLP(scope, num_features, int(num_features * ratio), activation)

    size = config.get("hidden_size", 3584)
    return QwenVisual(scope, num_features, size, layer_norm, make_mlp, patch_size=14, num_layers=32)


class Qwen2VLVision(QwenVision):
    make_visual = staticmethod(_qwen2_visual)


class Qwen2_5VLVision(QwenVision):
    make_visual = Qwen2_5Visual


class Exaone4_5Vision(QwenVision):
    """The vision tower of EXAONE 4.5: Qwen2.5-VL's with grouped-query attention; the text has a usual RoPE."""

    config_keys = ("vision_config",)
    make_visual = Qwen2_5Visual

    def _check_rope(self, config: HFConfig) -> None:
        """Accepts any rope."""


class Qwen3VLVision(QwenVision):
    make_visual = Qwen3Visual
    is_interleaved = True
    default_section = QWEN3_VL_MROPE


def _qwen3_5_visual(scope: LayerScope) -> Qwen3Visual:
    return Qwen3Visual(scope, deepstack_layers=())


class Qwen3_5Vision(QwenVision):
    make_visual = staticmethod(_qwen3_5_visual)
    is_interleaved = True
