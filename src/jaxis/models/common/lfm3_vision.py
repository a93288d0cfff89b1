"""Image encoder of LFM3-VL: gated convolutions over patches, some layers of attention, a projector."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from jaxis.config.layer_types import CONVOLUTION, FULL_ATTENTION, listed_layer_type
from jaxis.layers.checkpoint_names import CheckpointNames
from jaxis.layers.leaves import layer_norm, linear, rms_norm
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.module import JaxModule
from jaxis.layers.scope import LayerScope
from jaxis.models.common.qwen_vision import FlatFrameConvolution
from jaxis.models.common.vision_layers import (
    VisionProjector,
    attend_within,
    axial_angles,
    axial_rope_theta,
    one_segment,
    one_side,
    parameter,
    rotate_halves,
    run_layer,
    vision_scope,
)
from jaxis.models.common.vision_tower import Patches, VisionTower

if TYPE_CHECKING:
    from jaxis.config import VllmConfig


class Lfm3VisionAttention(JaxModule):
    """Grouped-query attention among an image's patches."""

    def __init__(self, scope: LayerScope, num_features: int, num_heads: int) -> None:
        config, into, out = scope.config, ("heads", "embed"), ("embed", "heads")
        self.num_heads, self.num_kv_heads = num_heads, config.get("num_key_value_heads", 8)
        head_dim, epsilon = num_features // num_heads, config.get("norm_eps", 1e-5)
        self.q_proj = linear(scope / "q_proj", num_features, num_features, axes=into)
        self.k_proj = linear(scope / "k_proj", num_features, self.num_kv_heads * head_dim, axes=into)
        self.v_proj = linear(scope / "v_proj", num_features, self.num_kv_heads * head_dim, axes=into)
        self.out_proj = linear(scope / "out_proj", num_features, num_features, axes=out)
        self.q_norm = rms_norm(scope, head_dim, epsilon=epsilon)
        self.k_norm = rms_norm(scope, head_dim, epsilon=epsilon)

    def __call__(self, x: jax.Array, angles: jax.Array, neighbours: jax.Array, num_patches: jax.Array) -> jax.Array:
        """x [P, C], of which the first `num_patches` are seen, and angles [P, D / 2] -> [P, C]."""
        del neighbours
        q = self.q_norm(self.q_proj(x).reshape(x.shape[0], self.num_heads, -1))
        k, v = (layer(x).reshape(x.shape[0], self.num_kv_heads, -1) for layer in (self.k_proj, self.v_proj))
        q, k = rotate_halves(q, angles), rotate_halves(self.k_norm(k), angles)
        return self.out_proj(attend_within(one_segment(x.shape[0], num_patches), q, k, v))


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
        self.in_proj = linear(scope / "in_proj", num_features, 3 * num_features, axes=("mlp", "embed"))
        self.spatial_conv = Lfm3SpatialConvolution(scope / "spatial_conv", num_features, side)
        self.out_proj = linear(scope / "out_proj", num_features, num_features, axes=("embed", "mlp"))

    def __call__(self, x: jax.Array, angles: jax.Array, neighbours: jax.Array, num_patches: jax.Array) -> jax.Array:
        """x [P, C], neighbours i32 [P, side * side], P for neighbours beyond the border -> [P, C]."""
        del angles, num_patches
        input_gate, gate, x = jnp.split(self.in_proj(x), 3, axis=-1)
        return self.out_proj(gate * self.spatial_conv(input_gate * x, neighbours))


class Lfm3VisionLayer(JaxModule):
    """A pre-norm layer with a convolution or with attention."""

    def __init__(self, scope: LayerScope, num_features: int, num_heads: int) -> None:
        config = scope.config
        epsilon, index = config.get("norm_eps", 1e-5), scope.layer_index
        kind = listed_layer_type(config, index, CONVOLUTION, FULL_ATTENTION)
        is_conv = (index < 2 or index % 2 == 1) if kind is None else kind == CONVOLUTION
        side = config.get("conv_kernel_size", 3)
        self.operator_norm = rms_norm(scope, num_features, epsilon=epsilon)
        self.mixer: Lfm3VisionConv | Lfm3VisionAttention
        if is_conv:
            self.mixer = Lfm3VisionConv(scope / "conv", num_features, side)
        else:
            self.mixer = Lfm3VisionAttention(scope / "self_attn", num_features, num_heads)
        self.ffn_norm = rms_norm(scope, num_features, epsilon=epsilon)
        size = config.get("intermediate_size", 2560)
        self.feed_forward = GatedMLP(scope / "feed_forward", intermediate_size=size, activation="silu")

    def __call__(self, x: jax.Array, angles: jax.Array, neighbours: jax.Array, num_patches: jax.Array) -> jax.Array:
        x = x + self.mixer(self.operator_norm(x), angles, neighbours, num_patches)
        return x + self.feed_forward(self.ffn_norm(x))


class Lfm3VisionTower(JaxModule):
    """The layers over an image's patches."""

    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        config.expect("model_type", "lfm3_vl_vision")
        config.expect("in_channels", 3)
        self.patch_size = one_side(config.get("patch_size", 16), config.source)
        self.merge_size: int = config.get("spatial_merge_size", 2)
        self.hidden_size: int = config.get("hidden_size", 1024)
        num_heads = config.get("num_attention_heads", 16)
        self.head_dim = self.hidden_size // num_heads
        self.rope_theta = axial_rope_theta(config, 1_000_000.0)
        self.reach = config.get("conv_kernel_size", 3) // 2
        self.num_frames: int = config.get("temporal_patch_size", 2)
        self.patch_embed = FlatFrameConvolution(
            scope / "patch_embed", self.hidden_size, self.num_frames, self.patch_size
        )
        self.embedding_norm = rms_norm(scope, self.hidden_size, epsilon=config.get("norm_eps", 1e-5))
        self.layers = [
            Lfm3VisionLayer(scope.layer(i), self.hidden_size, num_heads)
            for i in range(config.get("num_hidden_layers", 14))
        ]

    def __call__(self, patches: Patches) -> jax.Array:
        """Patches -> [P, C]."""
        x = self.embedding_norm(self.patch_embed(patches.pixels))
        angles, neighbours = axial_angles(patches, self.head_dim, self.rope_theta), patches_around(patches, self.reach)
        for layer in self.layers:
            x = run_layer(layer, x, angles, neighbours, patches.num_patches)
        return x


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
    config_keys = (
        *("vision_config", "projector_hidden_act", "projector_hidden_size", "projector_bias"),
        "text_config.hidden_size",
    )
    prefixes = ("vision_tower.", "multi_modal_projector.")
    names = CheckpointNames(
        (
            *(("patchifier", "patch_embed"), ("q_layernorm", "q_norm"), ("k_layernorm", "k_norm")),
            *(
                ("conv", "mixer"),
                ("self_attn", "mixer"),
                ("multi_modal_projector.layer_norm", "multi_modal_projector.pre_norm"),
            ),
            *(("feed_forward.w1", "feed_forward.gate_proj"), ("feed_forward.w3", "feed_forward.up_proj")),
            ("feed_forward.w2", "feed_forward.down_proj"),
        )
    )

    def __init__(self, vllm_config: VllmConfig, rng: nnx.Rngs) -> None:
        scope = LayerScope(vllm_config, rng, vllm_config.quant_config)
        config = scope.config
        self.vision_tower = Lfm3VisionTower(vision_scope(scope / "vision_tower"))
        self.patch_size, self.merge_size = self.vision_tower.patch_size, self.vision_tower.merge_size
        self.num_frames = self.vision_tower.num_frames
        self.multi_modal_projector = VisionProjector(
            scope / "multi_modal_projector",
            self.vision_tower.hidden_size,
            num_merged=self.merge_size**2,
            inner_size=config.get("projector_hidden_size", 4096),
            use_bias=config.get("projector_bias", True),
            make_norm=layer_norm,
            epsilon=1e-6,
        )

    def __call__(self, patches: Patches) -> jax.Array:
        return self.multi_modal_projector(self.vision_tower(patches))
