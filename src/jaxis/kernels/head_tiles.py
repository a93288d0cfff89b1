"""Heads in whole tiles of the native attention kernels; zeros behind a head change no bit of its scores and outputs."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxis.kernels.native_constants import ATTENTION_TILE


def whole_tiles(head_dim: int) -> int:
    """Returns the least multiple of a tile's dimensions that holds a head's."""
    return -(-head_dim // ATTENTION_TILE) * ATTENTION_TILE


def padded(x: jax.Array) -> jax.Array:
    """Pads queries, keys or values [T, H, D] with zeros to `whole_tiles(D)` dimensions."""
    missing = whole_tiles(x.shape[-1]) - x.shape[-1]
    return jnp.pad(x, ((0, 0), (0, 0), (0, missing))) if missing else x
