"""What vision towers are made of: patches, attention of all to all, and layers without a gate."""

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
_CUBIC = -0.75  # of PyTorch's bicubic interpolation
CLASS_ROWS = 64
"""Those that a class token and padding after it take: a number that chunks of attention divide."""


class PatchConvolution(JaxModule):
    """A convolution whose kernels do not overlap: a product with each patch.

    Args:
      scope: The layer's scope.
      patch_size: Pixels of a side of a patch.
      num_features: C.
      use_bias: Whether there is a `bias` [C].
    """

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
    """An embedding of each place.

    Args:
      scope: The table's scope.
      num_places: How many there are.
      num_features: C.
    """

    def __init__(self, scope: LayerScope, num_places: int, num_features: int) -> None:
        self.weight = parameter(scope, num_places, num_features)

    def __call__(self, places: jax.Array) -> jax.Array:
        """places i32 [P] -> [P, C]."""
        return self.weight[...][places]


class VisionMLP(JaxModule):
    """`fc2(act(fc1(x)))`.

    Args:
      scope: The layer's scope.
      num_features: C.
      intermediate_size: F.
      activation: Its name.

    Raises:
      ConfigError: The activation is unknown.
    """

    def __init__(self, scope: LayerScope, num_features: int, intermediate_size: int, activation: str) -> None:
        into, out = ("mlp", "embed"), ("embed", "mlp")
        self.fc1 = linear(scope / "fc1", num_features, intermediate_size, axes=into, use_bias=True)
        self.act = activation_function(activation)
        self.fc2 = linear(scope / "fc2", intermediate_size, num_features, axes=out, use_bias=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [P, C] -> [P, C]."""
        return self.fc2(self.act(self.fc1(x)))


class VisionProjector(JaxModule):
    """`linear_2(act(linear_1(x)))`: from a tower's features, of neighbours joined, to embeddings of the text.

    Args:
      scope: The projector's scope, with all of config.json unless it is given what else would be read there.
      num_features: C.
      size: E; None is that of the text in config.json.
      num_merged: Patches that become one embedding.
      inner_size: F, between the products; None is E.
      activation: Its name; None is that of config.json.
      use_bias: Whether the products have biases.
      make_norm: Makes a norm that comes first: `layer_norm` or `rms_norm`; None: there is none.
      epsilon: Of the norm.
      norms_merged: Whether it is over neighbours joined, not over each patch.

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
        """x [P, C], those that are joined next to each other -> [P / num_merged, E]."""
        x = x.reshape(-1, self.merged_size) if self.norms_merged else x
        x = x if self.pre_norm is None else self.pre_norm(x)
        return self.linear_2(self.act(self.linear_1(x.reshape(-1, self.merged_size))))


def attend_within(
    segments: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, *, scale: float | None = None
) -> jax.Array:
    """Attention of patches to each other within their segments.

    Args:
      segments: i32 [P], each patch's segment; that of padding is negative.
      q: [P, H, D].
      k: [P, K, D], K a divisor of H.
      v: [P, K, D].
      scale: Of scores; None is 1 / sqrt(D).

    Returns:
      [P, H * D].
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
    """`attend_within` of whole tiles of elements by a kernel, to which each segment is a range: [P, H, D]."""
    # Padding comes last, so that it does not move where segments begin.
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
    """The windows within which patches see each other.

    Attributes:
      patches: i32 [W, S], those of each window, P where it has fewer; windows in use come first.
      slots: i32 [P], where each patch is among them, window by window.
      count: i32, windows in use.
    """

    patches: jax.Array
    slots: jax.Array
    count: jax.Array

    @classmethod
    def of(cls, patches: Patches, side: int, merge_size: int) -> Windows:
        """The squares of an image.

        Args:
          patches: The image's.
          side: Patches of a side of a window, of which those at the lower and right edge may have fewer.
          merge_size: That divides the image's rows and columns.
        """
        num_rows, size = patches.rows.shape[0], side * side
        # No image of as many patches has more windows: one that is `merge_size` wide.
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
    """Attention of patches to each other within their windows, whose cost grows with the windows in use.

    Args:
      windows: The windows.
      q: [P, H, D].
      k: [P, K, D], K a divisor of H.
      v: [P, K, D].

    Returns:
      [P, H * D].
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
    """Attention of patches within their segments, i32 [P], or their windows; q, k and v as there -> [P, H * D]."""
    if isinstance(visible, Windows):
        return attend_in_windows(visible, q, k, v)
    return attend_within(visible, q, k, v)


def _of_each_head(q: jax.Array, k: jax.Array, v: jax.Array) -> list[jax.Array]:
    """Keys and values [P, K, D] as many heads of queries [P, H, D] share them -> [P, H, D] each."""
    group = q.shape[1] // k.shape[1]
    return [each if group == 1 else jnp.repeat(each, group, axis=1) for each in (k, v)]


def one_segment(num_rows: int, num_patches: jax.Array) -> jax.Array:
    """The segments of patches that all see each other: i32 [num_rows], those after `num_patches` apart."""
    return jnp.where(jnp.arange(num_rows) < num_patches, 0, -1)


def add_class_token(x: jax.Array, token: jax.Array, num_patches: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A class token, which patches see and which sees them, as the row after all patches and their padding.

    Args:
      x: [P, C].
      token: [C].
      num_patches: Those of x that are no padding.

    Returns:
      [P + CLASS_ROWS, C], and the segments of these rows for `attend_within`.
    """
    rows = jnp.arange(x.shape[0] + CLASS_ROWS)
    segments = jnp.where((rows < num_patches) | (rows == x.shape[0]), 0, -1)
    padding = jnp.zeros((CLASS_ROWS - 1, x.shape[-1]), x.dtype)
    return jnp.concatenate([x, token.astype(x.dtype)[None], padding]), segments


def rotate_halves(x: jax.Array, angles: jax.Array, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
    """x [P, H, D] with its halves rotated by angles [P, D / 2], in `dtype`."""
    cos, sin = jnp.cos(angles).astype(dtype)[:, None], jnp.sin(angles).astype(dtype)[:, None]
    first, second = jnp.split(x.astype(dtype), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def rotate_pairs(x: jax.Array, angles: jax.Array) -> jax.Array:
    """x [P, H, D]: pairs of neighbours rotated by angles [P, D / 2], in float32."""
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
    """A table of positions stretched over an image, with the weights of PyTorch's interpolation.

    Args:
      table: [side, side, C].
      patches: The image's.
      is_cubic: Whether the interpolation is bicubic, over the sixteen places of the table around each patch, or
        bilinear, over four.
      aligns_corners: Whether the table's outermost places lie in the middle of the image's outermost patches, not at
        the image's border with theirs.
      is_zero_beyond: Whether there is nothing beyond the table's border, instead of what is at it.

    Returns:
      float32 [P, C].
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
    """The angles by which pairs of a head's elements are rotated: by row in its first half, by column in the second.

    Args:
      patches: The image's.
      head_dim: D.
      theta: The base.

    Returns:
      float32 [P, D / 2].
    """
    inverse = 1.0 / theta ** (jnp.arange(0, head_dim // 2, 2, dtype=jnp.float32) / (head_dim // 2))
    places = (patches.rows, patches.columns)
    return jnp.concatenate([each.astype(jnp.float32)[:, None] * inverse for each in places], axis=-1)


def axial_rope_theta(config: HFConfig, default: float) -> float:
    """The base of a RoPE that goes by row and column, in a tower's config.

    Raises:
      ConfigError: The config has a RoPE of another kind.
    """
    rope = config.read_object("rope_parameters") or {}
    if rope.get("rope_type", "default") not in ("axial", "default"):
        raise ConfigError(f"{config.source}: the vision tower has rope_type={rope['rope_type']!r}, which is not known")
    return float(rope.get("rope_theta") or default)


def vision_scope(scope: LayerScope) -> LayerScope:
    """The scope of a tower, whose config is the checkpoint's `vision_config`."""
    model_config = dataclasses.replace(scope.vllm_config.model_config, hf_config=scope.config["vision_config"])
    return dataclasses.replace(scope, vllm_config=dataclasses.replace(scope.vllm_config, model_config=model_config))


def one_side(value: Any, source: str) -> int:
    """A size that may be given once or for both sides.

    Raises:
      ConfigError: The sides differ.
    """
    sides = value if isinstance(value, list | tuple) else [value]
    if len(set(sides)) != 1 or not isinstance(sides[0], int):
        raise ConfigError(f"{source}: the vision tower has sides of {value!r}; expected a square")
    return sides[0]


def parameter(scope: LayerScope, *shape: int) -> nnx.Param:
    """A parameter that every device has all of."""
    return make_parameter(scope.rngs, DEFAULT_INIT, shape, scope.dtype, axes=(None,) * len(shape))


def run_layer(layer: Any, *args: jax.Array | Windows | None) -> jax.Array:
    """Calls a layer; equal ones are traced once."""
    return layer(*args) if calls_are_observed() else _run_layer(*nnx.split(layer), *args)


@jax.jit(static_argnums=0)
def _run_layer(graphdef: nnx.GraphDef[Any], state: nnx.State, *args: jax.Array | Windows | None) -> jax.Array:
    return nnx.merge(graphdef, state)(*args)
