"""Image encoder of LFM3-VL: gated convolutions over patches, some layers of attention, a projector."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxis.config.layer_types import CONVOLUTION, FULL_ATTENTION, listed_layer_type
from jaxis.layers.checkpoint_names import CheckpointNames
from jaxis.layers.leaves import layer_norm, linear, rms_norm
from jaxis.layers.module import JaxModule
from jaxis.layers.scope import LayerScope
from jaxis.models.common.towers.layers import parameter
from jaxis.models.common.towers.options import VisionOptions, of_model, of_vision
from jaxis.models.common.towers.patches import Patches
from jaxis.models.common.towers.positions import AxialRope
from jaxis.models.common.towers.projector import Projection
from jaxis.models.common.towers.siglip import PROJECTOR
from jaxis.models.common.towers.tower import VisionTower
from jaxis.models.common.towers.transformer import LayerInputs, VisionAttention, VisionTransformer, frame_convolution


class Lfm3SpatialConvolution(JaxModule):
    """A convolution of each feature over neighbouring patches, which are zero beyond the image's border."""

    def __init__(self, scope: LayerScope, num_features: int, side: int) -> None:
        self.weight = parameter(scope, num_features, 1, side, side)

    def __call__(self, x: jax.Array, neighbours: jax.Array) -> jax.Array:
        """x [P, C], neighbours i32 [P, side * side], P for neighbours beyond the border -> [P, C]."""
        kernel = self.weight[...].reshape(x.shape[-1], -1).astype(jnp.float32)
        around = jnp.pad(x, ((0, 1), (0, 0))).astype(jnp.float32)
        taps = (around[neighbours[:, i]] * kernel[:, i] for i in range(kernel.shape[-1]))
        return sum(taps, start=jnp.zeros((), jnp.float32)).astype(x.dtype)


class Lfm3VisionConv(JaxModule):
    """`out_proj(gate * conv(input_gate * x))`, where `in_proj` computes the input gate, the gate, and x."""

    def __init__(self, scope: LayerScope, num_features: int, side: int) -> None:
        self.reach = side // 2
        self.in_proj = linear(scope / "in_proj", num_features, 3 * num_features, axes=("mlp", "embed"))
        self.spatial_conv = Lfm3SpatialConvolution(scope / "spatial_conv", num_features, side)
        self.out_proj = linear(scope / "out_proj", num_features, num_features, axes=("embed", "mlp"))

    def __call__(self, x: jax.Array, neighbours: jax.Array) -> jax.Array:
        """x [P, C], neighbours i32 [P, side * side], P for neighbours beyond the border -> [P, C]."""
        input_gate, gate, x = jnp.split(self.in_proj(x), 3, axis=-1)
        return self.out_proj(gate * self.spatial_conv(input_gate * x, neighbours))


def lfm3_mixer(scope: LayerScope, options: VisionOptions) -> Lfm3VisionConv | VisionAttention:
    """Creates the convolution or the attention of a layer."""
    config, index = scope.config, scope.layer_index
    kind = listed_layer_type(config, index, CONVOLUTION, FULL_ATTENTION)
    if (index < 2 or index % 2 == 1) if kind is None else kind == CONVOLUTION:
        scope = dataclasses.replace(scope, prefix=f"{scope.prefix.removesuffix('attn')}conv")
        return Lfm3VisionConv(scope, options.hidden_size, config.get("conv_kernel_size", 3))
    return VisionAttention(scope, options)


class Lfm3Transformer(VisionTransformer):
    """The vision transformer, whose convolutions take the neighbours of each patch."""

    def layer_inputs(self, patches: Patches, segments: jax.Array) -> Sequence[LayerInputs]:
        convolutions = [each.attn for each in self.layers if isinstance(each.attn, Lfm3VisionConv)]
        neighbours = patches_around(patches, max((each.reach for each in convolutions), default=0))
        usual = super().layer_inputs(patches, segments)
        return [
            (neighbours,) if layer.attn in convolutions else of_layer
            for layer, of_layer in zip(self.layers, usual, strict=True)
        ]


def patches_around(patches: Patches, reach: int) -> jax.Array:
    """Returns the neighbours of each patch, `reach` on each side: i32 [P, (2 * reach + 1) ** 2].

    They are indices, row by row; P for neighbours beyond the border.
    """
    rows, columns, count = patches.rows, patches.columns, patches.rows.shape[0]
    # Padding is in the first row and column.
    width, height = jnp.max(columns) + 1, jnp.max(rows) + 1
    index = jnp.arange(count, dtype=jnp.int32)
    places = jnp.where(index < patches.num_patches, rows * width + columns, count)
    at_place = jnp.full(count, count, jnp.int32).at[places].set(index, mode="drop")
    steps, around = range(-reach, reach + 1), []
    for row, column in ((rows + down, columns + across) for down in steps for across in steps):
        is_inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
        around.append(jnp.where(is_inside, at_place[jnp.where(is_inside, row * width + column, 0)], count))
    return jnp.stack(around, axis=-1)


class Lfm3Vision(VisionTower):
    names = CheckpointNames(
        (
            *(("vision_tower", "tower"), ("tower.patchifier", "tower.patch_embed"), PROJECTOR),
            *(("tower.embedding_norm", "tower.pre_norm"), ("operator_norm", "norm1"), ("ffn_norm", "norm2")),
            *(("self_attn.out_proj", "self_attn.o_proj"), ("conv", "attn"), ("self_attn", "attn")),
            *(("q_layernorm", "q_norm"), ("k_layernorm", "k_norm"), ("projector.layer_norm", "projector.pre_norm")),
            *(("feed_forward", "mlp"), ("mlp.w1", "mlp.gate_proj"), ("mlp.w3", "mlp.up_proj")),
            ("mlp.w2", "mlp.down_proj"),
        )
    )
    vision = VisionOptions(
        *(1024, 2560, 14, 16, 16, "silu"),
        num_kv_heads=of_vision("num_key_value_heads", 8),
        merge_size=of_vision("spatial_merge_size", 2),
        num_frames=of_vision("temporal_patch_size", 2),
        is_gated=True,
        make_norm=rms_norm,
        epsilon=of_vision("norm_eps", 1e-5),
        embed_patches=functools.partial(frame_convolution, is_flat=True),
        norms=("pre_norm",),
        rope=AxialRope(theta=1_000_000.0),
        qkv_bias=False,
        out_bias=False,
        qk_norm_epsilon=of_vision("norm_eps", 1e-5),
        make_mixer=lfm3_mixer,
        expected={"model_type": ("lfm3_vl_vision",)},
    )
    tower_class = Lfm3Transformer
    make_projector = Projection(
        inner_sizes=(of_model("projector_hidden_size", 4096),),
        use_bias=of_model("projector_bias", True),
        make_norm=layer_norm,
        epsilon=1e-6,
    )
