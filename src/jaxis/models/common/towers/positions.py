"""Positions of patches in vision towers: tables of embeddings, and RoPE by row and column.

Shapes are [P, C] for P patches of C features and [P, H, D] for H heads of D features.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxis.config.hf_config import HFConfig
from jaxis.errors import ConfigError
from jaxis.layers.module import JaxModule
from jaxis.layers.scope import LayerScope
from jaxis.models.common.towers.layers import one_side, parameter
from jaxis.models.common.towers.patches import Patches

_CUBIC = -0.75  # parameter of PyTorch's bicubic interpolation


LookUp = Callable[[jax.Array, Patches], jax.Array]
"""Function from a table of positions and the patches to their embeddings [P, C]."""


@dataclass(frozen=True)
class Positions:
    """A table of position embeddings.

    Attributes:
      look_up: Function from the table and the patches to their embeddings [P, C].
      shape: Shape of the table [..., C], without C; with `image_size`, without the last two axes.
      image_size: Default side of the square view that has a place for each patch, in pixels; None: `shape` is all.
      class_place: Row of the class token, the first (0) or the last (-1); None if the table has none.
    """

    look_up: LookUp
    shape: tuple[int, ...] = ()
    image_size: int | None = None
    class_place: int | None = None

    def of_views(self, vision: HFConfig, patch_size: int) -> Positions:
        """Returns the table with the places of a `vision_config`'s views."""
        if self.image_size is None:
            return self
        side = one_side(vision.get("image_size", self.image_size), vision.source) // patch_size
        return dataclasses.replace(self, shape=(*self.shape, side**2 + (self.class_place is not None)))


class PositionTable(JaxModule):
    def __init__(self, scope: LayerScope, positions: Positions, num_features: int) -> None:
        self.positions, self.weight = positions, parameter(scope, *positions.shape, num_features)

    def __call__(self, patches: Patches) -> jax.Array:
        """Patches -> [P, C]."""
        table, place = self.weight[...], self.positions.class_place
        if place is not None:
            rows = table.reshape(-1, table.shape[-1])
            table = rows[1:] if place == 0 else rows[:-1]
        return self.positions.look_up(table, patches)

    def of_class(self) -> jax.Array:
        """Returns the class token's embedding [C]."""
        table, place = self.weight[...], self.positions.class_place
        return jnp.zeros((), table.dtype) if place is None else table.reshape(-1, table.shape[-1])[place]


def square(table: jax.Array) -> jax.Array:
    """Table of a square's positions -> [side, side, C]."""
    side = math.isqrt(math.prod(table.shape[:-1]))
    return table.reshape(side, side, -1)


def learned(table: jax.Array, patches: Patches) -> jax.Array:
    """Looks up patches of a square view in a table [side ** 2, C] -> [P, C]."""
    return table[patches.rows * math.isqrt(table.shape[0]) + patches.columns]


def stretched_positions(
    table: jax.Array,
    patches: Patches,
    *,
    is_cubic: bool = False,
    aligns_corners: bool = False,
    is_zero_beyond: bool = False,
) -> jax.Array:
    """Interpolates the table of a square's positions over an image, float32 [P, C], as PyTorch's interpolation does.

    Args:
      table: The table [..., C].
      patches: Patches of the image.
      is_cubic: True for bicubic interpolation, over sixteen positions around each patch; False for bilinear, over four.
      aligns_corners: True to align the centers of the outermost positions and patches, False to align the borders of
        table and image.
      is_zero_beyond: True for zeros beyond the table's border, False for the values at the border.
    """
    table = square(table)
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


def rotate_halves(x: jax.Array, angles: jax.Array, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
    """Rotates the halves of x [P, H, D] by angles [P, D / 2], in `dtype`; with fewer angles, of its first features."""
    cos, sin = jnp.cos(angles).astype(dtype)[:, None], jnp.sin(angles).astype(dtype)[:, None]
    half = angles.shape[-1]
    first, second, rest = jnp.split(x.astype(dtype), [half, 2 * half], axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1).astype(x.dtype)


def rotate_halves_in_type(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Rotates as `rotate_halves`, in the type of x."""
    return rotate_halves(x, angles, x.dtype)


def rotate_pairs(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Rotates pairs of neighbours of x [P, H, D] by angles [P, D / 2], in float32."""
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    pairs = x.astype(jnp.float32).reshape(*x.shape[:2], -1, 2)
    first, second = pairs[..., 0], pairs[..., 1]
    rotated = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.reshape(x.shape).astype(x.dtype)


@dataclass(frozen=True, kw_only=True)
class AxialRope:
    """RoPE by row and column.

    Attributes:
      theta: Base of the frequencies.
      rotate: Function that rotates x [P, H, D] by angles [P, D / 2].
      columns_first: True if the first half of the angles belongs to columns, False if to rows.
      first: Number of the first row and column.
      alternates: True if angles of both alternate instead of being halves.
      splits_frequencies: True if every other frequency belongs to each of both, False if both have the same.
      counts_time: True if as many angles before these belong to time, which is 0 for images.
    """

    theta: float
    rotate: Callable[[jax.Array, jax.Array], jax.Array] = rotate_halves
    columns_first: bool = False
    first: int = 0
    alternates: bool = False
    splits_frequencies: bool = False
    counts_time: bool = False

    def angles(self, patches: Patches, head_dim: int) -> jax.Array:
        """Returns float32 [P, D / 2], or fewer if D is no multiple of twice the axes."""
        size = head_dim if self.splits_frequencies else head_dim // (3 if self.counts_time else 2) // 2 * 2
        inverse = 1.0 / self.theta ** (jnp.arange(0, size, 2, dtype=jnp.float32) / size)
        inverses = (inverse[0::2], inverse[1::2]) if self.splits_frequencies else (inverse, inverse)
        places = (patches.columns, patches.rows) if self.columns_first else (patches.rows, patches.columns)
        angles = [
            (each + self.first).astype(jnp.float32)[:, None] * of_axis
            for each, of_axis in zip(places, inverses, strict=True)
        ]
        if self.alternates:
            return jnp.stack(angles, axis=-1).reshape(angles[0].shape[0], -1)
        return jnp.concatenate([jnp.zeros_like(angles[0])] * self.counts_time + angles, axis=-1)


def axial_rope_theta(config: HFConfig, default: float) -> float:
    """Returns the base of a tower's RoPE by row and column. Raises ConfigError for another kind of RoPE."""
    rope = config.read_object("rope_parameters") or {}
    if rope.get("rope_type", "default") not in ("axial", "default"):
        raise ConfigError(f"{config.source}: the vision tower has rope_type={rope['rope_type']!r}, which is not known")
    return float(rope.get("rope_theta") or default)
