"""One projection of queries, keys and values, `qkv_proj`, as checkpoints pack its rows."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class QKVPacking:
    """The rows of a `qkv_proj` [(H + 2 K) D, E]: equal parts, each with its queries, its keys, and as many values.

    Attributes:
      num_parts: Number of parts; 0 stands for one for each key-value head, until the layer knows how many it has.
      values_first: True if the values of a part come before its keys.
    """

    num_parts: int = 1
    values_first: bool = False

    def split(self, packed: jax.Array, q_size: int) -> list[jax.Array]:
        """Splits outputs [T, N] into queries [T, q_size], keys and values; heads of keys may have copies."""
        parts = packed.reshape(packed.shape[0], self.num_parts, -1)
        q_end = q_size // self.num_parts
        q, k, v = jnp.split(parts, [q_end, (q_end + parts.shape[-1]) // 2], axis=-1)
        if self.values_first:
            k, v = v, k
        return [each.reshape(packed.shape[0], -1) for each in (q, k, v)]

    def rows(self, q_size: int, kv_size: int) -> list[np.ndarray]:
        """Returns the rows of all queries, of all keys and of all values, by head: int [n] each."""
        by_part = np.arange(q_size + 2 * kv_size).reshape(self.num_parts, -1)
        q, k, v = np.split(by_part, np.array([q_size, q_size + kv_size]) // self.num_parts, axis=1)
        if self.values_first:
            k, v = v, k
        return [q.ravel(), k.ravel(), v.ravel()]


PACKED = QKVPacking()
"""All queries, then all keys, then all values."""
PACKED_BY_GROUP = QKVPacking(num_parts=0)
"""For each key-value head its queries, keys and values."""
