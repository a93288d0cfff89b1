"""Parts of vision towers: patches, attention, layers without a gate, interpolated positions.

Shapes are [P, C] for P patches of C features, [P, H, D] for H heads of D features, F for features inside a feed-forward
block and E for features of the text model. `patch_size` counts pixels of a side of a patch. The scope of a tower and of
its layers has the checkpoint's `vision_config` as its config (`vision_scope`), a projector's has all of config.json.
Towers raise a ConfigError for settings that are not supported.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxis.errors import ConfigError
from jaxis.kernels.native_constants import ATTENTION_TILE
from jaxis.kernels.sequence_attention import has_kernel, kernel_attention
from jaxis.kernels.weights import matmul
from jaxis.layers.leaves import linear
from jaxis.layers.linear import DEFAULT_INIT
from jaxis.layers.mlp import activation_function
from jaxis.layers.module import JaxModule, calls_are_observed, make_parameter
from jaxis.layers.scope import LayerScope
from jaxis.models.common.vision_tower import Patches

if TYPE_CHECKING:
    from jaxis.config.hf_config import HFConfig

MakeNorm = Callable[..., Any]
"""`layer_norm` or `rms_norm`."""

_QUERY_CHUNK = 256  # patches whose scores are in memory at once
_WINDOWS_AT_ONCE = 4
_CUBIC = -0.75  # parameter of PyTorch's bicubic interpolation
CLASS_ROWS = 64
"""Rows that a class token and padding after it take; a multiple of the chunks of attention."""


class PatchConvolution(JaxModule):
    """A convolution without overlap: a product with each patch, plus a `bias` [C] if there is one."""

    def __init__(self, scope: LayerScope, patch_size: int, num_features: int, *, use_bias: bool = False) -> None:
        self.weight = parameter(scope, num_features, 3, patch_size, patch_size)
        self.bias = parameter(scope, num_features) if use_bias else None

    def __call__(self, pixels: jax.Array) -> jax.Array:
        """pixels [P, patch * patch * 3], channels last -> [P, C]."""
        return patch_products(pixels, self.weight[...], None if self.bias is None else self.bias[...])


def patch_products(pixels: jax.Array, kernels: jax.Array, bias: jax.Array | None) -> jax.Array:
    """pixels [P, patch * patch * N], channels last; kernels [C, N, patch, patch]; bias [C] or None -> [P, C]."""
    product = matmul(pixels, kernels.transpose(0, 2, 3, 1).reshape(kernels.shape[0], -1))
    return product if bias is None else product + bias


class PositionTable(JaxModule):
    """An embedding of each of `num_places` positions."""

    def __init__(self, scope: LayerScope, num_places: int, num_features: int) -> None:
        self.weight = parameter(scope, num_places, num_features)

    def __call__(self, places: jax.Array) -> jax.Array:
        """places i32 [P] -> [P, C]."""
        return self.weight[...][places]


class VisionMLP(JaxModule):
    """`fc2(act(fc1(x)))`. Raises ConfigError if the activation is unknown."""

    def __init__(self, scope: LayerScope, num_features: int, intermediate_size: int, activation: str) -> None:
        into, out = ("mlp", "embed"), ("embed", "mlp")
        self.fc1 = linear(scope / "fc1", num_features, intermediate_size, axes=into, use_bias=True)
        self.act = activation_function(activation)
        self.fc2 = linear(scope / "fc2", intermediate_size, num_features, axes=out, use_bias=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc2(self.act(self.fc1(x)))


class VisionProjector(JaxModule):
    """`linear_2(act(linear_1(x)))`: projects a tower's features of joined neighbours to embeddings of the text.

    Args:
      num_features: C.
      size: E; None means the text's `hidden_size`.
      num_merged: Number of patches that become one embedding.
      inner_size: F, between the products; None means E.
      activation: Name of the activation; None means config.json's `projector_hidden_act`.
      use_bias: True if the products have biases.
      make_norm: Factory of a norm before the products, `layer_norm` or `rms_norm`; None for no norm.
      epsilon: Epsilon of the norm.
      norms_merged: True if the norm is over joined neighbours, False if over each patch.

    Raises:
      ConfigError: The activation is unknown.
    """

    def __init__(
        self,
        scope: LayerScope,
        num_features: int,
        size: int | None = None,
        *,
        num_merged: int = 1,
        inner_size: int | None = None,
        activation: str | None = None,
        use_bias: bool = True,
        make_norm: MakeNorm | None = None,
        epsilon: float = 1e-5,
        norms_merged: bool = False,
    ) -> None:
        self.merged_size, self.norms_merged = num_features * num_merged, norms_merged
        into, out = ("mlp", "embed"), ("embed", "mlp")
        outer: int = size or scope.config["text_config"]["hidden_size"]
        inner = inner_size or outer
        normed = self.merged_size if norms_merged else num_features
        self.pre_norm = None if make_norm is None else make_norm(scope, normed, epsilon=epsilon)
        self.linear_1 = linear(scope / "linear_1", self.merged_size, inner, axes=into, use_bias=use_bias)
        self.act = activation_function(activation or scope.config.get("projector_hidden_act", "gelu"))
        self.linear_2 = linear(scope / "linear_2", inner, outer, axes=out, use_bias=use_bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [P, C], joined patches next to each other -> [P / num_merged, E]."""
        x = x.reshape(-1, self.merged_size) if self.norms_merged else x
        x = x if self.pre_norm is None else self.pre_norm(x)
        return self.linear_2(self.act(self.linear_1(x.reshape(-1, self.merged_size))))


def attend_within(
    segments: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, *, scale: float | None = None
) -> jax.Array:
    """Returns attention [P, H * D] among patches of the same segment, i32 [P]; negative segments are padding.

    q is [P, H, D]; k and v are [P, K, D], K a divisor of H. The default scale is 1 / sqrt(D).
    """
    num_patches = q.shape[0]
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    padding = ((0, 0), (0, 0), (0, -q.shape[-1] % ATTENTION_TILE))
    padded = [jnp.pad(each, padding) for each in (q, k, v)]
    if has_kernel(*padded):
        return _attend_by_kernel(segments, *padded, scale=factor)[..., : q.shape[-1]].reshape(num_patches, -1)
    k, v = _of_each_head(q, k, v)

    def attend(chunk: tuple[jax.Array, jax.Array]) -> jax.Array:
        q, own = chunk
        scores = jnp.einsum("qhd,khd->hqk", q, k, preferred_element_type=jnp.float32) * factor
        weights = jax.nn.softmax(jnp.where(own[:, None] == segments, scores, -jnp.inf), axis=-1)
        return jnp.einsum("hqk,khd->qhd", weights.astype(v.dtype), v)

    chunk = math.gcd(_QUERY_CHUNK, num_patches)
    return jax.lax.map(attend, (q.reshape(-1, chunk, *q.shape[1:]), segments.reshape(-1, chunk))).reshape(
        num_patches, -1
    )


def _attend_by_kernel(segments: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, *, scale: float) -> jax.Array:
    """Computes `attend_within` for whole tiles of elements by a kernel; each segment becomes a range. -> [P, H, D]."""
    # Padding comes last, so that it does not move the beginnings of segments.
    numbers = segments.astype(jnp.uint32)
    order = jnp.argsort(numbers, stable=True)
    ordered = numbers[order]
    first = jnp.searchsorted(ordered, ordered, side="left").astype(jnp.int32)
    last = jnp.searchsorted(ordered, ordered, side="right").astype(jnp.int32) - 1
    keys, values = (each[order].astype(jnp.float32).swapaxes(0, 1) for each in (k, v))

    def attend(chunk: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        q, first, last = chunk
        return kernel_attention(q, keys, values, first, last, scale=scale)

    chunk = math.gcd(_QUERY_CHUNK, q.shape[0])
    chunks = [each.reshape(-1, chunk, *each.shape[1:]) for each in (q[order], first, last)]
    return jax.lax.map(attend, tuple(chunks)).reshape(q.shape)[jnp.argsort(order)]


class Windows(NamedTuple):
    """Windows within which patches see each other.

    Attributes:
      patches: i32 [W, S], patches of each window, filled up with P. Windows in use come first.
      slots: i32 [P], position of each patch in the flattened `patches`.
      count: i32, number of windows in use.
    """

    patches: jax.Array
    slots: jax.Array
    count: jax.Array

    @classmethod
    def of(cls, patches: Patches, side: int, merge_size: int) -> Windows:
        """Divides an image, whose rows and columns `merge_size` divides, into square windows of `side` patches a side.

        Windows at the lower and right edge may have fewer.
        """
        num_rows, size = patches.rows.shape[0], side * side
        # The most windows of this many patches: those of an image that is `merge_size` wide.
        most = -(-(num_rows // (side * merge_size) + 1) // _WINDOWS_AT_ONCE) * _WINDOWS_AT_ONCE
        across = jnp.max(patches.columns) // side + 1
        windows = patches.rows // side * across + patches.columns // side
        slots = windows * size + patches.rows % side * side + patches.columns % side
        index = jnp.arange(num_rows, dtype=jnp.int32)
        is_padding = index >= patches.num_patches
        places = jnp.where(is_padding, most * size, slots)
        inside = jnp.full(most * size, num_rows, jnp.int32).at[places].set(index, mode="drop")
        count = jnp.max(jnp.where(is_padding, 0, windows)) + 1
        return cls(inside.reshape(most, size), jnp.where(is_padding, 0, slots), count)


def attend_in_windows(windows: Windows, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Returns attention [P, H * D] among patches of the same window. Its cost grows with the windows in use.

    q is [P, H, D]; k and v are [P, K, D], K a divisor of H.
    """
    num_patches, size, scale = q.shape[0], windows.patches.shape[1], q.shape[-1] ** -0.5
    k, v = _of_each_head(q, k, v)
    q, k, v = (jnp.pad(each, ((0, 1), (0, 0), (0, 0))) for each in (q, k, v))
    lowest = jnp.finfo(jnp.float32).min

    def attend(i: jax.Array, attended: jax.Array) -> jax.Array:
        inside = jax.lax.dynamic_slice_in_dim(windows.patches, i * _WINDOWS_AT_ONCE, _WINDOWS_AT_ONCE)
        scores = jnp.einsum("wqhd,wkhd->whqk", q[inside], k[inside], preferred_element_type=jnp.float32) * scale
        weights = jax.nn.softmax(jnp.where(inside[:, None, None] < num_patches, scores, lowest), axis=-1)
        rows = jnp.einsum("whqk,wkhd->wqhd", weights.astype(v.dtype), v[inside])
        rows = rows.reshape(_WINDOWS_AT_ONCE * size, *v.shape[1:])
        return jax.lax.dynamic_update_slice_in_dim(attended, rows, i * rows.shape[0], axis=0)

    attended = jnp.zeros((windows.patches.size, *v.shape[1:]), v.dtype)
    steps = -(-windows.count // _WINDOWS_AT_ONCE)
    return jax.lax.fori_loop(0, steps, attend, attended)[windows.slots].reshape(num_patches, -1)


def attend_to_visible(visible: jax.Array | Windows, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """`attend_within` for segments i32 [P], `attend_in_windows` for windows -> [P, H * D]."""
    if isinstance(visible, Windows):
        return attend_in_windows(visible, q, k, v)
    return attend_within(visible, q, k, v)


def _of_each_head(q: jax.Array, k: jax.Array, v: jax.Array) -> list[jax.Array]:
    """Repeats keys and values [P, K, D] for the heads of queries [P, H, D] -> [P, H, D] each."""
    group = q.shape[1] // k.shape[1]
    return [each if group == 1 else jnp.repeat(each, group, axis=1) for each in (k, v)]


def one_segment(num_rows: int, num_patches: jax.Array) -> jax.Array:
    """Returns segments i32 [num_rows]: 0 for the first `num_patches` rows, -1 for padding."""
    return jnp.where(jnp.arange(num_rows) < num_patches, 0, -1)


def add_class_token(x: jax.Array, token: jax.Array, num_patches: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Adds a class token [C] as the row after all patches and their padding. It sees patches, and they see it.

    Returns [P + CLASS_ROWS, C] for x [P, C], and the segments of these rows for `attend_within`. `num_patches` rows of
    x are no padding.
    """
    rows = jnp.arange(x.shape[0] + CLASS_ROWS)
    segments = jnp.where((rows < num_patches) | (rows == x.shape[0]), 0, -1)
    padding = jnp.zeros((CLASS_ROWS - 1, x.shape[-1]), x.dtype)
    return jnp.concatenate([x, token.astype(x.dtype)[None], padding]), segments


def rotate_halves(x: jax.Array, angles: jax.Array, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
    """Rotates the halves of x [P, H, D] by angles [P, D / 2], in `dtype`."""
    cos, sin = jnp.cos(angles).astype(dtype)[:, None], jnp.sin(angles).astype(dtype)[:, None]
    first, second = jnp.split(x.astype(dtype), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def rotate_pairs(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Rotates pairs of neighbours of x [P, H, D] by angles [P, D / 2], in float32."""
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    pairs = x.astype(jnp.float32).reshape(*x.shape[:2], -1, 2)
    first, second = pairs[..., 0], pairs[..., 1]
    rotated = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.reshape(x.shape).astype(x.dtype)


def stretched_positions(
    table: jax.Array,
    patches: Patches,
    *,
    is_cubic: bool = False,
    aligns_corners: bool = False,
    is_zero_beyond: bool = False,
) -> jax.Array:
    """Interpolates a table [side, side, C] of positions over an image, float32 [P, C], as PyTorch's interpolation does.

    Args:
      table: The table.
      patches: Patches of the image.
      is_cubic: True for bicubic interpolation, over sixteen positions around each patch; False for bilinear, over four.
      aligns_corners: True to align the centers of the outermost positions and patches, False to align the borders of
        table and image.
      is_zero_beyond: True for zeros beyond the table's border, False for the values at the border.
    """
    side, taps = table.shape[0], []
    for places in (patches.rows, patches.columns):
        # Padding is in the first row and column.
        at, last = places.astype(jnp.float32), jnp.max(places)
        at = at * (side - 1) / jnp.maximum(last, 1) if aligns_corners else (at + 0.5) / (last + 1) * side - 0.5
        low = jnp.floor(at)
        beyond = at - low
        weights = (1 - beyond, beyond)
        if is_cubic:
            weights = (_far(1 + beyond), _near(beyond), _near(1 - beyond), _far(2 - beyond))
        first = low.astype(jnp.int32) + 1 - len(weights) // 2
        around = [(first + i, each) for i, each in enumerate(weights)]
        if is_zero_beyond:
            around = [(place, jnp.where((place >= 0) & (place < side), each, 0)) for place, each in around]
        taps.append([(jnp.clip(place, 0, side - 1), each) for place, each in around])
    return sum(
        (
            table[row, column].astype(jnp.float32) * (by_row * by_column)[:, None]
            for row, by_row in taps[0]
            for column, by_column in taps[1]
        ),
        start=jnp.zeros((), jnp.float32),
    )


def _near(distance: jax.Array) -> jax.Array:
    return ((_CUBIC + 2) * distance - (_CUBIC + 3)) * distance * distance + 1


def _far(distance: jax.Array) -> jax.Array:
    return ((_CUBIC * distance - 5 * _CUBIC) * distance + 8 * _CUBIC) * distance - 4 * _CUBIC


def axial_angles(patches: Patches, head_dim: int, theta: float) -> jax.Array:
    """Returns angles float32 [P, D / 2] that rotate pairs of a head's elements: first half by row, second by column."""
    inverse = 1.0 / theta ** (jnp.arange(0, head_dim // 2, 2, dtype=jnp.float32) / (head_dim // 2))
    places = (patches.rows, patches.columns)
    return jnp.concatenate([each.astype(jnp.float32)[:, None] * inverse for each in places], axis=-1)


def axial_rope_theta(config: HFConfig, default: float) -> float:
    """Returns the base of a tower's RoPE by row and column. Raises ConfigError for another kind of RoPE."""
    rope = config.read_object("rope_parameters") or {}
    if rope.get("rope_type", "default") not in ("axial", "default"):
        raise ConfigError(f"{config.source}: the vision tower has rope_type={rope['rope_type']!r}, which is not known")
    return float(rope.get("rope_theta") or default)


def vision_scope(scope: LayerScope) -> LayerScope:
    """Returns the scope of a tower, whose config is the checkpoint's `vision_config`."""
    model_config = dataclasses.replace(scope.vllm_config.model_config, hf_config=scope.config["vision_config"])
    return dataclasses.replace(scope, vllm_config=dataclasses.replace(scope.vllm_config, model_config=model_config))


def one_side(value: Any, source: str) -> int:
    """Returns a size that is given once or for both sides. Raises ConfigError if the sides differ."""
    sides = value if isinstance(value, list | tuple) else [value]
    if len(set(sides)) != 1 or not isinstance(sides[0], int):
        raise ConfigError(f"{source}: the vision tower has sides of {value!r}; expected a square")
    return sides[0]


def parameter(scope: LayerScope, *shape: int) -> nnx.Param:
    """A parameter that is replicated on every device."""
    return make_parameter(scope.rngs, DEFAULT_INIT, shape, scope.dtype, axes=(None,) * len(shape))


def run_layer(layer: Any, *args: jax.Array | Windows | None) -> jax.Array:
    """Calls a layer; equal layers are traced once."""
    return layer(*args) if calls_are_observed() else _run_layer(*nnx.split(layer), *args)


@jax.jit(static_argnums=0)
def _run_layer(graphdef: nnx.GraphDef[Any], state: nnx.State, *args: jax.Array | Windows | None) -> jax.Array:
    return nnx.merge(graphdef, state)(*args)
