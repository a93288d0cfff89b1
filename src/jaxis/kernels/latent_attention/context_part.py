"""Which of a block's tokens a device's part of a paged cache holds, where devices share each block's tokens."""

from __future__ import annotations

from typing import NamedTuple

import jax


class ContextPart(NamedTuple):
    """The consecutive tokens of every block that are in one device's cache.

    Blocks have the same numbers on all devices, and a sequence's tokens are spread evenly whatever blocks it has.

    Attributes:
      block_size: B, tokens of a whole block.
      size: Tokens of each block in this cache.
      first: i32 [], the first of them, from 0.
    """

    block_size: int
    size: int
    first: jax.Array

    def position_of(self, slots: jax.Array) -> jax.Array:
        """The position in a sequence of each of its tokens in this cache, counted in the order of its blocks."""
        return slots // self.size * self.block_size + self.first + slots % self.size
