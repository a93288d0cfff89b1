"""Layout of the paged cache on TPU: whole rows of 128 lanes, which neither XLA nor a kernel has to re-arrange.

A layer's cache is `[num_blocks, K, N, 128]`. A kv head's N rows of a block are planes of B rows, one row per token:

- D <= 64: one plane, whose rows hold a token's key from lane 0 on, and its value from lane 64 on;
- D > 64: the keys' planes, 128 elements each and the last padded, then as many planes of the values;
- latent attention (K = 1): the latents' planes, which are keys and values at once, then those of the rope keys.

In an int8 cache, 8 rows of scales follow: their bytes are two rows of 128 float32, for the two parts of an entry (key
and value, or latent and rope key). The scale of the token at position p is in lane p % 128, so that the scales of 128
consecutive tokens are in order whichever blocks hold them. (A 32-bit element is four bytes in consecutive rows of one
lane, which is how a TPU packs bytes into its registers.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxis.errors import ConfigError
from jaxis.kernels.paged_cache import CacheLayout
from jaxis.kernels.ragged_paged_attention.layout import quantize

LANES = 128
SCALE_ROWS = 8
# From the rows of a register with bfloat16, the smallest type that is multiplied, to the lanes of scales.
SMALL_BLOCK_SIZES = (16, 32, 64, 128)
CACHE_DTYPES = (jnp.float32, jnp.bfloat16, jnp.int8)


@dataclass(frozen=True)
class PageLayout:
    """Places of an entry's parts in the rows of one kv head in one block.

    Attributes:
      block_size: B.
      part_widths: Elements of each of the entry's two parts, padded.
      key_scales: Part (0 or 1) of the elements in each of the first planes, which are multiplied with queries.
      value_planes: Planes that are multiplied with weights.
      value_part: Part of the elements in these planes.
      value_lane: Lane in the first of these planes where a value begins.
      is_scaled: True if numbers are int8 and have scales.
    """

    block_size: int
    part_widths: tuple[int, int]
    key_scales: tuple[int, ...]
    value_planes: range
    value_part: int
    value_lane: int
    is_scaled: bool

    @classmethod
    def of_heads(cls, block_size: int, head_dim: int, dtype: DTypeLike) -> PageLayout:
        """Returns the layout for keys and values with D = `head_dim` elements each."""
        is_scaled = dtype == jnp.int8
        if 2 * head_dim <= LANES:
            return cls(block_size, (LANES // 2, LANES // 2), (0,), range(1), 1, LANES // 2, is_scaled)
        planes = -(-head_dim // LANES)
        widths = (planes * LANES, planes * LANES)
        return cls(block_size, widths, (0,) * planes, range(planes, 2 * planes), 1, 0, is_scaled)

    @classmethod
    def of_latents(cls, block_size: int, value_dim: int, rope_dim: int, dtype: DTypeLike) -> PageLayout:
        """Returns the layout for latents, which are keys and values, and rope keys, which are only keys."""
        values, ropes = -(-value_dim // LANES), -(-rope_dim // LANES)
        key_scales = (0,) * values + (1,) * ropes
        return cls(block_size, (values * LANES, ropes * LANES), key_scales, range(values), 0, 0, dtype == jnp.int8)

    @property
    def num_planes(self) -> int:
        return sum(self.part_widths) // LANES

    @property
    def num_rows(self) -> int:
        return self.num_planes * self.block_size + (SCALE_ROWS if self.is_scaled else 0)

    def of_cache(self, shape: tuple[int, ...]) -> PageLayout:
        """Returns this layout with the block size of a cache of shape [num_blocks, K, N, 128]."""
        rows = shape[2] - (SCALE_ROWS if self.is_scaled else 0)
        return dataclasses.replace(self, block_size=rows // self.num_planes)

    def rows_of(self, plane: int) -> slice:
        return slice(plane * self.block_size, (plane + 1) * self.block_size)

    @property
    def scale_rows(self) -> slice:
        return slice(self.num_rows - SCALE_ROWS, self.num_rows)

    def cache_layout(self, num_kv_heads: int, dtype: DTypeLike, head_axis: str | None) -> CacheLayout:
        """Returns the layout of a layer's cache; `head_axis` is the logical name of its axis of heads.

        Raises ConfigError if blocks of this size cannot be read as whole rows.
        """
        # Chunks are whole blocks and whole registers of 128 scores.
        is_large = self.block_size % LANES == 0 and not self.is_scaled
        if self.block_size not in SMALL_BLOCK_SIZES and not is_large:
            larger = "with an int8 cache" if self.is_scaled else "or a multiple of 128"
            sizes = ", ".join(map(str, SMALL_BLOCK_SIZES))
            raise ConfigError(f"block_size={self.block_size}: on TPU it must be one of {sizes} {larger}")
        shape, axes = (num_kv_heads, self.num_rows, LANES), (head_axis, None, None)
        return CacheLayout("tpu", self.block_size, num_kv_heads, shape, np.dtype(dtype), axes)

    def pad(self, parts: Sequence[jax.Array]) -> jax.Array:
        """Joins the two parts of entries, each [..., d], in the order of their planes: [..., P * 128]."""
        padded = []
        for part, width in zip(parts, self.part_widths, strict=True):
            padded.append(jnp.pad(part, [(0, 0)] * (part.ndim - 1) + [(0, width - part.shape[-1])]))
        return jnp.concatenate(padded, axis=-1)


def quantize_parts(parts: tuple[jax.Array, jax.Array]) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """Quantizes the two parts of entries, each [..., d], to int8 [..., d] and float32 scales [..., 2]."""
    (first, first_scale), (second, second_scale) = (quantize(part) for part in parts)
    return (first, second), jnp.concatenate([first_scale, second_scale], axis=-1)


def supports(dtype: DTypeLike) -> bool:
    return np.dtype(dtype) in CACHE_DTYPES
