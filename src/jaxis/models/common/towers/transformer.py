"""The vision transformer that families share: embeddings of patches, layers, norm.

Shapes are [P, C] for P patches of C features, [P, H, D] for H heads of D features, F for features inside a feed-forward
block and E for features of the text model. The scope of the transformer has the checkpoint's `vision_config` as its
config (`vision_scope`), a projector's has all of config.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxis.layers.leaves import linear, rms_norm
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.module import JaxModule, calls_are_observed
from jaxis.layers.scope import LayerScope
from jaxis.models.common.towers.attention import Windows, attend_to_visible, one_segment
from jaxis.models.common.towers.layers import PatchConvolution, VisionMLP, parameter
from jaxis.models.common.towers.options import VisionOptions
from jaxis.models.common.towers.patches import Patches
from jaxis.models.common.towers.positions import PositionTable

CLASS_ROWS = 64
"""Rows that a class token and padding after it take; a multiple of the chunks of attention."""

LayerInputs = tuple[jax.Array | Windows | None, ...]


class VisionAttention(JaxModule):
    """Attention among patches, with the options' heads, norms and RoPE."""

    def __init__(self, scope: LayerScope, options: VisionOptions) -> None:
        size, head_dim = options.hidden_size, options.head_dim
        num_heads, num_kv_heads = options.num_heads, options.num_kv_heads or options.num_heads
        self.head_dim, self.num_heads, self.num_kv_heads = head_dim, num_heads, num_kv_heads
        self.rotate, self.scale = None if options.rope is None else options.rope.rotate, options.attention_scale

        make, into, out = options.make_linear, ("heads", "embed"), ("embed", "heads")

        def projection(name: str, heads: int) -> Any:
            return make(scope / name, size, heads * head_dim, axes=into, use_bias=options.qkv_bias)

        self.qkv = projection("qkv", num_heads + 2 * num_kv_heads) if options.packs_qkv else None
        if not options.packs_qkv:
            self.q_proj, self.k_proj = projection("q_proj", num_heads), projection("k_proj", num_kv_heads)
            self.v_proj = projection("v_proj", num_kv_heads)
        self.o_proj = make(scope / "o_proj", num_heads * head_dim, size, axes=out, use_bias=options.out_bias)
        self.q_norm = self.k_norm = None
        if (epsilon := options.qk_norm_epsilon) is not None:
            normed = num_heads * head_dim if options.norms_all_heads else head_dim
            self.q_norm, self.k_norm = (rms_norm(scope, normed, epsilon=epsilon) for _ in range(2))

    def heads(self, x: jax.Array) -> list[jax.Array]:
        """x [P, C] -> queries [P, H, D], keys and values [P, K, D]."""
        if self.qkv is not None:
            packed = self.qkv(x).reshape(x.shape[0], -1, self.head_dim)
            q, k, v = jnp.split(packed, [self.num_heads, self.num_heads + self.num_kv_heads], axis=1)
        else:
            parts = (each(x) for each in (self.q_proj, self.k_proj, self.v_proj))
            q, k, v = (each.reshape(x.shape[0], -1, self.head_dim) for each in parts)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = (
                norm(each.reshape(x.shape[0], -1, norm.num_features)).reshape(each.shape)
                for norm, each in ((self.q_norm, q), (self.k_norm, k))
            )
        return [q, k, v]

    def __call__(self, x: jax.Array, angles: jax.Array | None, visible: jax.Array | Windows) -> jax.Array:
        """x [P, C], angles [P, D / 2] or None, visible: segments i32 [P] or windows -> [P, C]."""
        q, k, v = self.heads(x)
        if self.rotate is not None and angles is not None:
            q, k = self.rotate(q, angles), self.rotate(k, angles)
        return self.o_proj(attend_to_visible(visible, q, k, v, scale=self.scale))


def vision_mlp(scope: LayerScope, options: VisionOptions) -> VisionMLP | GatedMLP:
    """Creates the feed-forward block of a layer, with a gate if the options say so."""
    size, activation = options.intermediate_size, options.activation
    if not options.is_gated:
        return VisionMLP(scope, options.hidden_size, size, activation)
    return GatedMLP(scope, intermediate_size=size, activation=activation, use_bias=options.mlp_bias)


def patch_convolution(scope: LayerScope, options: VisionOptions) -> PatchConvolution:
    """Creates a convolution over the patches of an image."""
    return PatchConvolution(scope, options.hidden_size, options.patch_size, use_bias=options.patch_bias)


def frame_convolution(scope: LayerScope, options: VisionOptions, **flat: Any) -> PatchConvolution:
    """Creates a convolution over the frames of a view; `flat` are arguments of `PatchConvolution`."""
    sizes = {"num_frames": options.num_frames, "use_bias": options.patch_bias}
    return PatchConvolution(scope, options.hidden_size, options.patch_size, **sizes | flat)


def patch_product(scope: LayerScope, options: VisionOptions) -> Any:
    """Creates a product with a patch's pixels, channels last."""
    size = 3 * options.patch_size**2
    return linear(scope, size, options.hidden_size, axes=(None, None), use_bias=options.patch_bias)


class VisionLayer(JaxModule):
    """A pre-norm layer."""

    def __init__(self, scope: LayerScope, options: VisionOptions) -> None:
        self.norm1, self.norm2 = (
            options.make_norm(scope, options.hidden_size, epsilon=options.epsilon) for _ in range(2)
        )
        self.attn: Any = (options.make_mixer or VisionAttention)(scope / "attn", options)
        self.mlp = (options.make_mlp or vision_mlp)(scope / "mlp", options)
        make = options.make_after
        self.after_attn, self.after_mlp = (None if make is None else make(scope, options) for _ in range(2))

    def __call__(self, x: jax.Array, *inputs: jax.Array | Windows | None) -> jax.Array:
        """x [P, C], and the layer's entry of `layer_inputs` -> [P, C]."""
        update = self.attn(self.norm1(x), *inputs)
        x = x + (update if self.after_attn is None else self.after_attn(update))
        update = self.mlp(self.norm2(x))
        return x + (update if self.after_mlp is None else self.after_mlp(update))


class VisionTransformer(JaxModule):
    """Embeddings of patches, layers, norm.

    Attributes:
      options: The family's.
    """

    def __init__(self, scope: LayerScope, options: VisionOptions) -> None:
        self.options, size = options, options.hidden_size
        self.patch_embed = (options.embed_patches or patch_convolution)(scope / "patch_embed", options)
        table, shape = options.positions, options.class_shape
        self.position_embed = None if table is None else PositionTable(scope / "position_embed", table, size)
        self.class_token = None if shape is None else parameter(scope, *shape, size)
        self.patch_norm, self.pre_norm, self.post_norm = (
            options.make_norm(scope, size, epsilon=options.epsilon) if name in options.norms else None
            for name in ("patch_norm", "pre_norm", "post_norm")
        )
        self.layers = [VisionLayer(scope.layer(i), options) for i in range(options.num_layers)]

    def __call__(self, patches: Patches) -> list[jax.Array]:
        """Patches -> states [P, C], one for each of `outputs`."""
        x, segments = self.embed(patches)
        x = x if self.pre_norm is None else self.pre_norm(x)
        outputs = self.options.outputs or (len(self.layers),)
        states, inputs = [x], self.layer_inputs(patches, segments)
        for layer, of_layer in zip(self.layers[: max(outputs)], inputs, strict=False):
            states.append(run_layer(layer, states[-1], *of_layer))
        rows = patches.pixels.shape[0]
        handed_on = [states[number] if self.class_token is None else states[number][:rows] for number in outputs]
        return handed_on if self.post_norm is None else [self.post_norm(handed_on[0]), *handed_on[1:]]

    def embed(self, patches: Patches) -> tuple[jax.Array, jax.Array]:
        """Patches -> embeddings [P, C], and segments i32 [P] of those that see each other.

        A class token is the row after all patches and their padding, and `CLASS_ROWS` rows with it.
        """
        x, table, rows = self.patch_embed(patches.pixels), self.position_embed, patches.rows.shape[0]
        x = x if self.patch_norm is None else self.patch_norm(x)
        x = x if table is None else x + table(patches).astype(x.dtype)
        if self.class_token is None:
            return x, one_segment(rows, patches.num_patches)
        token = self.class_token[...].reshape(-1)
        token = token if table is None else token + table.of_class()
        padding = jnp.zeros((CLASS_ROWS - 1, x.shape[-1]), x.dtype)
        places = jnp.arange(rows + CLASS_ROWS)
        segments = jnp.where((places < patches.num_patches) | (places == rows), 0, -1)
        return jnp.concatenate([x, token.astype(x.dtype)[None], padding]), segments

    def layer_inputs(self, patches: Patches, segments: jax.Array) -> Sequence[LayerInputs]:
        """Returns further inputs of each layer: angles [P, D / 2] or None, and what a patch sees."""
        options, angles = self.options, None
        if options.rope is not None:
            angles = options.rope.angles(patches, options.head_dim)
            angles = jnp.pad(angles, ((0, segments.shape[0] - angles.shape[0]), (0, 0)))
        if options.window_side is None:
            return [(angles, segments)] * len(self.layers)
        windows = Windows.of(patches, options.window_side, options.merge_size)
        return [(angles, segments if i in options.whole_layers else windows) for i in range(len(self.layers))]


def run_layer(layer: Any, *args: jax.Array | Windows | None) -> jax.Array:
    """Calls a layer; equal layers are traced once."""
    return layer(*args) if calls_are_observed() else _run_layer(*nnx.split(layer), *args)


@jax.jit(static_argnums=0)
def _run_layer(graphdef: nnx.GraphDef[Any], state: nnx.State, *args: jax.Array | Windows | None) -> jax.Array:
    return nnx.merge(graphdef, state)(*args)
