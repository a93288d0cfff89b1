"""Attention of vision towers: among patches of a segment, or of a window.

Shapes are [P, H, D] for P patches and H heads of D features.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxis.kernels.head_tiles import padded
from jaxis.kernels.sequence_attention import has_kernel, kernel_attention
from jaxis.models.common.towers.patches import Patches

_QUERY_CHUNK = 256  # patches whose scores are in memory at once
_WINDOWS_AT_ONCE = 4


def attend_within(
    segments: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, *, scale: float | None = None
) -> jax.Array:
    """Returns attention [P, H * D] among patches of the same segment, i32 [P]; negative segments are padding.

    q is [P, H, D]; k and v are [P, K, D], K a divisor of H. The default scale is 1 / sqrt(D).
    """
    num_patches = q.shape[0]
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    if has_kernel(q, k, v):
        return _attend_by_kernel(segments, padded(q), padded(k), padded(v), scale=factor)[..., : q.shape[-1]].reshape(
            num_patches, -1
        )
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


def attend_in_windows(
    windows: Windows, q: jax.Array, k: jax.Array, v: jax.Array, *, scale: float | None = None
) -> jax.Array:
    """Returns attention [P, H * D] among patches of the same window. Its cost grows with the windows in use.

    Arguments besides `windows` are those of `attend_within`.
    """
    num_patches, size = q.shape[0], windows.patches.shape[1]
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    k, v = _of_each_head(q, k, v)
    q, k, v = (jnp.pad(each, ((0, 1), (0, 0), (0, 0))) for each in (q, k, v))
    lowest = jnp.finfo(jnp.float32).min

    def attend(i: jax.Array, attended: jax.Array) -> jax.Array:
        inside = jax.lax.dynamic_slice_in_dim(windows.patches, i * _WINDOWS_AT_ONCE, _WINDOWS_AT_ONCE)
        scores = jnp.einsum("wqhd,wkhd->whqk", q[inside], k[inside], preferred_element_type=jnp.float32) * factor
        weights = jax.nn.softmax(jnp.where(inside[:, None, None] < num_patches, scores, lowest), axis=-1)
        rows = jnp.einsum("whqk,wkhd->wqhd", weights.astype(v.dtype), v[inside])
        rows = rows.reshape(_WINDOWS_AT_ONCE * size, *v.shape[1:])
        return jax.lax.dynamic_update_slice_in_dim(attended, rows, i * rows.shape[0], axis=0)

    attended = jnp.zeros((windows.patches.size, *v.shape[1:]), v.dtype)
    steps = -(-windows.count // _WINDOWS_AT_ONCE)
    return jax.lax.fori_loop(0, steps, attend, attended)[windows.slots].reshape(num_patches, -1)


def attend_to_visible(
    visible: jax.Array | Windows, q: jax.Array, k: jax.Array, v: jax.Array, *, scale: float | None = None
) -> jax.Array:
    """`attend_within` for segments i32 [P], `attend_in_windows` for windows -> [P, H * D]."""
    if isinstance(visible, Windows):
        return attend_in_windows(visible, q, k, v, scale=scale)
    return attend_within(visible, q, k, v, scale=scale)


def _of_each_head(q: jax.Array, k: jax.Array, v: jax.Array) -> list[jax.Array]:
    """Repeats keys and values [P, K, D] for the heads of queries [P, H, D] -> [P, H, D] each."""
    group = q.shape[1] // k.shape[1]
    return [each if group == 1 else jnp.repeat(each, group, axis=1) for each in (k, v)]


def one_segment(num_rows: int, num_patches: jax.Array) -> jax.Array:
    """Returns segments i32 [num_rows]: 0 for the first `num_patches` rows, -1 for padding."""
    return jnp.where(jnp.arange(num_rows) < num_patches, 0, -1)
