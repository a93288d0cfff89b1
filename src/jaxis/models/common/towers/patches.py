"""Patches of a view of an image, and the packed vector that passes them to a vision tower's program."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Patches(NamedTuple):
    """P patches of a view of an image, with padding.

    Attributes:
      pixels: [P, patch * patch * 3 * frames], row by row and channels last, frame after frame. uint8 on the host; in
        the tower, values that the processor computed from them.
      rows, columns: i32 [P], row and column of each patch.
      num_patches: i32, number of patches without the padding.
    """

    pixels: jax.Array
    rows: jax.Array
    columns: jax.Array
    num_patches: jax.Array


def pack_patches(pixels: np.ndarray, patch_size: int, merge_size: int, num_padded: int) -> np.ndarray:
    """Packs a view of an image, uint8 [height, width, 3 * frames], into one int32 vector, for `unpack_patches`.

    Patches to be merged are adjacent, so that merging is a reshape. The sides are multiples of
    `patch_size * merge_size`, and `num_padded` P is one of `merge_size ** 2`.
    """
    height, width, channels = pixels.shape
    rows, columns = height // patch_size, width // patch_size
    groups = rows // merge_size, merge_size, columns // merge_size, merge_size
    in_patches = pixels.reshape(groups[0], merge_size, patch_size, groups[2], merge_size, patch_size, channels)
    in_patches = in_patches.transpose(0, 3, 1, 4, 2, 5, 6).reshape(rows * columns, -1)
    grid = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"))
    grid = grid.reshape(2, *groups).transpose(0, 1, 3, 2, 4).reshape(2, -1)
    num_patches = rows * columns
    places = np.zeros((2, num_padded), np.int32)
    places[:, :num_patches] = grid
    data = np.zeros(-(-num_padded * in_patches.shape[1] // 4) * 4, np.uint8)
    data[: in_patches.size] = in_patches.ravel()
    return np.concatenate([np.asarray([num_patches], np.int32), places.ravel(), data.view(np.int32)])


def packed_size(num_padded: int, patch_size: int, num_channels: int) -> int:
    """Returns the length of `pack_patches`' result."""
    return 1 + 2 * num_padded + -(-num_padded * patch_size * patch_size * num_channels // 4)


def unpack_patches(packed: jax.Array, patch_size: int, num_padded: int, num_channels: int) -> Patches:
    """Unpacks the patches of a view, with uint8 pixels, inside a jitted function."""
    size = patch_size * patch_size * num_channels
    data = jax.lax.bitcast_convert_type(packed[1 + 2 * num_padded :], jnp.uint8).reshape(-1)
    places = packed[1 : 1 + 2 * num_padded].reshape(2, num_padded)
    return Patches(data[: num_padded * size].reshape(num_padded, size), places[0], places[1], packed[0])
