"""ALiBi (arXiv:2108.12409): a bias of scores that falls with a key's distance, in place of positional encoding."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.kernels.head_tiles import whole_tiles

_NUM_PARTS = 3  # of 8 bits each: as many as float32 has


@dataclass(frozen=True)
class Alibi:
    """Adds `slope * position of the key` to the scores of a head, which softmax takes for `-slope * distance`.

    The bias is a product of extra dimensions of queries and keys, so that attention, its kernels and its cache need not
    know of it. The extra dimensions of a key are its bias, in parts that bfloat16 holds exactly; those of a query are a
    power of two.

    Attributes:
      rounds: True if slopes, positions and their products are rounded to bfloat16, as in the reference of Falcon.
      multiplier: Multiplies the biases.
    """

    slopes: tuple[float, ...]
    rounds: bool = False
    multiplier: float = 1.0

    @classmethod
    def of_powers(cls, num_heads: int, *, rounds: bool = False, multiplier: float = 1.0) -> Alibi:
        """Returns BLOOM's and Falcon's slopes: heads beyond a power of two get every other slope of twice as many."""
        power = 2 ** math.floor(math.log2(num_heads))
        slopes = [*_powers(power), *_powers(2 * power)[::2]][:num_heads]
        return cls(tuple(map(float, slopes)), rounds, multiplier)

    @classmethod
    def of_max_bias(cls, num_heads: int, max_bias: float) -> Alibi:
        """Returns MPT's slopes: those of the next power of two, every other one first; the least is 2 ** -max_bias."""
        power = 2 ** math.ceil(math.log2(num_heads))
        slopes = [2.0 ** -(max_bias * i / power) for i in range(1, power + 1)]
        return cls(tuple(slopes if power == num_heads else (slopes[1::2] + slopes[::2])[:num_heads]))

    def dims_with(self, head_dim: int) -> int:
        """Returns the dimensions of an extended query or key of D dimensions: whole tiles, for the native kernel."""
        return whole_tiles(head_dim + _NUM_PARTS)

    def extend(self, q: jax.Array, k: jax.Array, positions: jax.Array, *, scale: float) -> tuple[jax.Array, jax.Array]:
        """Extends q and k [T, H, D] at positions i32 [T] to `dims_with(D)` dimensions, for scores times `scale`."""
        factor = 2.0 ** math.floor(-math.log2(scale))
        slopes, places = jnp.asarray(self.slopes, jnp.float32), positions[:, None].astype(jnp.float32)
        bias = _round(_round(slopes) * _round(places)) if self.rounds else slopes * places
        rest = bias * np.float32(self.multiplier / (scale * factor))
        parts = []
        for _ in range(_NUM_PARTS):
            parts.append(_round(rest))
            rest = rest - parts[-1]
        zeros = self.dims_with(q.shape[-1]) - q.shape[-1] - _NUM_PARTS
        of_keys = jnp.pad(jnp.stack(parts, axis=-1), ((0, 0), (0, 0), (0, zeros))).astype(k.dtype)
        of_queries = np.zeros(of_keys.shape[-1], np.float32)
        of_queries[:_NUM_PARTS] = factor
        of_queries = jnp.broadcast_to(jnp.asarray(of_queries, q.dtype), of_keys.shape)
        return jnp.concatenate([q, of_queries], axis=-1), jnp.concatenate([k, of_keys], axis=-1)


def _round(x: jax.Array) -> jax.Array:
    """Rounds to bfloat16. XLA may leave out a cast there and back."""
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def _powers(num_heads: int) -> np.ndarray:
    """Returns slopes of a power of two of heads: float32 powers of a base, as the reference computes them."""
    return (np.float64(np.float32(2.0 ** -(8 / num_heads))) ** np.arange(1, num_heads + 1)).astype(np.float32)
