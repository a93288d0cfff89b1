"""The vision transformer that families share: embeddings of patches, layers, norm, and a projector to the text.

A family's file states its `VisionOptions` and its projector in a `TransformerTower`. Parameters have the same names in
all families; `names` of the class is the only mapping to a checkpoint's.

Shapes are [P, C] for P patches of C features, [P, H, D] for H heads of D features, F for features inside a feed-forward
block and E for features of the text model. The scope of the transformer has the checkpoint's `vision_config` as its
config (`vision_scope`), a projector's has all of config.json.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import nnx

from jaxis.config import VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.layers.checkpoint_names import CheckpointNames
from jaxis.layers.leaves import layer_norm, linear, rms_norm
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.module import JaxModule, calls_are_observed
from jaxis.layers.scope import LayerScope
from jaxis.models.common.vision_attention import Windows, attend_to_visible, one_segment
from jaxis.models.common.vision_layers import (
    MakeNorm,
    PatchConvolution,
    VisionMLP,
    one_side,
    parameter,
    vision_scope,
)
from jaxis.models.common.vision_positions import AxialRope, Positions, PositionTable, axial_rope_theta
from jaxis.models.common.vision_tower import Patches, VisionTower

CLASS_ROWS = 64
"""Rows that a class token and padding after it take; a multiple of the chunks of attention."""
_KEYS = {
    **{"hidden_size": "hidden_size", "intermediate_size": "intermediate_size", "patch_size": "patch_size"},
    **{"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads", "activation": "hidden_act"},
}
_SIDES = ("patch_size", "merge_size")
_NOT_OF_TOWERS = "the tower has no such setting: it is the processor's, a head's or a video's"

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


@dataclass(frozen=True)
class VisionOptions:
    """A family's vision transformer: the defaults of its reference, with which `read` reads a config.

    Attributes:
      hidden_size, intermediate_size: C and F.
      num_layers: Number of layers.
      num_heads, num_kv_heads: H and K, of which K divides H; None for K means H.
      patch_size: Pixels of a side of a patch.
      activation: Name of the activation of feed-forward blocks.
      head_size: D; None means C / H.
      merge_size: Patches of a side of the square that becomes one embedding.
      num_frames: Frames of a view of a video; 1 for images only.
      is_gated: True for feed-forward blocks with a gate.
      make_norm, epsilon: Factory of the norms, and their epsilon.
      embed_patches: Factory of the embedding of patches, called with a scope and the options.
      patch_bias: True if it has a bias.
      positions: Table of positions; None for none.
      class_shape: Shape of the class token's parameter; None for no class token.
      norms: Norms outside the layers: `patch_norm` (before positions), `pre_norm`, `post_norm`.
      rope: Rotation of queries and keys by row and column; None for none.
      packs_qkv: True if one product computes queries, keys and values.
      qkv_bias, out_bias, mlp_bias: True if the products have biases; `mlp_bias` is that of gated blocks.
      qk_norm_epsilon: Epsilon of norms of queries and keys; None for no norms.
      norms_all_heads: True if such a norm is over all heads together.
      attention_scale: Factor of the scores; None means 1 / sqrt(D).
      window_side: Patches of a side of the windows within which layers see; None for no windows.
      whole_layers: Layers that see all of an image nevertheless.
      outputs: Numbers of layers after which the states are handed on; empty means after all.
      make_linear: Factory of the products of attention.
      make_mixer, make_mlp: Factories of a layer's two blocks, called with a scope and the options.
      make_after: Factory of a module between each block and its residual; None for none.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_size: int
    activation: str
    _: KW_ONLY
    num_kv_heads: int | None = None
    head_size: int | None = None
    merge_size: int = 1
    num_frames: int = 1
    is_gated: bool = False
    make_norm: MakeNorm = layer_norm
    epsilon: float = 1e-6
    embed_patches: Callable[[LayerScope, VisionOptions], Any] = patch_convolution
    patch_bias: bool = False
    positions: Positions | None = None
    class_shape: tuple[int, ...] | None = None
    norms: Sequence[str] = ()
    rope: AxialRope | None = None
    packs_qkv: bool = False
    qkv_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = False
    qk_norm_epsilon: float | None = None
    norms_all_heads: bool = False
    attention_scale: float | None = None
    window_side: int | None = None
    whole_layers: Sequence[int] = ()
    outputs: Sequence[int] = ()
    make_linear: Callable[..., Any] = linear
    make_mixer: Callable[[LayerScope, VisionOptions], Any] = VisionAttention
    make_mlp: Callable[[LayerScope, VisionOptions], Any] = vision_mlp
    make_after: Callable[[LayerScope, VisionOptions], Any] | None = None

    @property
    def head_dim(self) -> int:
        return self.head_size or self.hidden_size // self.num_heads

    @property
    def num_merged(self) -> int:
        """Number of patches that become one embedding."""
        return self.merge_size**2

    @property
    def merged_size(self) -> int:
        """Features of the patches that become one embedding."""
        return self.hidden_size * self.num_merged

    def read(self, vision: HFConfig, *model_types: str, **keys: str) -> Self:
        """Returns the options with the values of a `vision_config`.

        Args:
          vision: The config.
          *model_types: Expected values of its `model_type`; any if there are none.
          **keys: Key of each option that it may say, besides those of `_KEYS`.

        Raises:
          ConfigError: A setting is not supported.
        """
        if model_types:
            vision.expect("model_type", *model_types)
        for key in ("num_channels", "in_channels", "in_chans"):
            vision.expect(key, 3)
        vision.expect("attention_dropout", 0.0)
        values = {name: vision.get(key, getattr(self, name)) for name, key in {**_KEYS, **keys}.items()}
        values |= {name: one_side(values.get(name, getattr(self, name)), vision.source) for name in _SIDES}
        if self.rope is not None:
            theta = axial_rope_theta(vision, vision.get("rope_theta", self.rope.theta))
            values["rope"] = dataclasses.replace(self.rope, theta=theta)
        return dataclasses.replace(self, **values)


class VisionLayer(JaxModule):
    """A pre-norm layer."""

    def __init__(self, scope: LayerScope, options: VisionOptions) -> None:
        self.norm1, self.norm2 = (
            options.make_norm(scope, options.hidden_size, epsilon=options.epsilon) for _ in range(2)
        )
        self.attn = options.make_mixer(scope / "attn", options)
        self.mlp = options.make_mlp(scope / "mlp", options)
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
        self.patch_embed = options.embed_patches(scope / "patch_embed", options)
        table = options.positions
        self.position_embed = None if table is None else PositionTable(scope / "position_embed", table, size)
        self.class_token = None if options.class_shape is None else parameter(scope, *options.class_shape)
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


class TransformerTower(VisionTower):
    """A `VisionTransformer` and a projector.

    A family overrides `options`.

    Attributes:
      tower_class: Class of the transformer.
      make_projector: Factory of the projector, called with a scope and the options.
      checkpoint_names: Table of names of this model's checkpoint.
      tower: The transformer.
      projector: Module that maps the transformer's states, joined to one, to [P / merge_size ** 2, E].
    """

    prefixes = ("tower.", "projector.")
    tower_class: ClassVar[type[VisionTransformer]] = VisionTransformer
    make_projector: ClassVar[Callable[[LayerScope, VisionOptions], Any]]

    def __init__(self, vllm_config: VllmConfig, rng: nnx.Rngs) -> None:
        self.checkpoint_names = self.names_of(vllm_config.model_config.hf_config)
        scope = LayerScope(vllm_config, rng, vllm_config.quant_config, names=self.checkpoint_names)
        of_tower = vision_scope(scope / "tower")
        for key in ("vision_use_head", "tie_word_embeddings", "temporal_patch_size", "tokens_per_second"):
            of_tower.config.ignore(key, because=_NOT_OF_TOWERS)
        options = self.options(scope.config)
        self.patch_size, self.merge_size, self.num_frames = options.patch_size, options.merge_size, options.num_frames
        self.tower = self.tower_class(of_tower, options)
        self.projector = type(self).make_projector(scope / "projector", options)

    @classmethod
    def names_of(cls, config: HFConfig) -> CheckpointNames:
        """Returns the names of a config's checkpoint; those of its kind if `names` has several."""
        del config
        return cls.names

    @classmethod
    def options(cls, config: HFConfig) -> VisionOptions:
        """Reads config.json, with its `vision_config`.

        Raises:
          ConfigError: A setting is not supported.
        """
        raise NotImplementedError

    def __call__(self, patches: Patches) -> jax.Array:
        return self.projector(jnp.concatenate(self.tower(patches), axis=-1))


def run_layer(layer: Any, *args: jax.Array | Windows | None) -> jax.Array:
    """Calls a layer; equal layers are traced once."""
    return layer(*args) if calls_are_observed() else _run_layer(*nnx.split(layer), *args)


@jax.jit(static_argnums=0)
def _run_layer(graphdef: nnx.GraphDef[Any], state: nnx.State, *args: jax.Array | Windows | None) -> jax.Array:
    return nnx.merge(graphdef, state)(*args)
