"""ALiBi (arXiv:2108.12409): a bias of scores that falls with the distance of a key, in place of positions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.kernels.native_constants import ATTENTION_TILE

_NUM_PARTS = 3  # of 8 bits each: as many as float32 has


@dataclass(frozen=True)
class Alibi:
    """Adds `slope * position of the key` to the scores of a head, which softmax takes for `-slope * distance`.

    The bias is a product of dimensions that queries and keys have beyond the model's own, so that attention itself, its
    kernels and its cache need not know of it. A key's are its bias, in parts that bfloat16 holds exactly; a query's are
    a power of two.

    Attributes:
      slopes: Of each head.
      rounds: Whether slopes, positions and their products are rounded to bfloat16, as the reference rounds Falcon's.
      multiplier: Multiplies the biases.
    """

    slopes: tuple[float, ...]
    rounds: bool = False
    multiplier: float = 1.0

    @classmethod
    def of_powers(cls, num_heads: int, *, rounds: bool = False, multiplier: float = 1.0) -> Alibi:
        """BLOOM's and Falcon's slopes: heads beyond a power of two get every other slope of twice as many.

        Args:
          num_heads: H.
          rounds: See the class.
          multiplier: See the class.
        """
        power = 2 ** math.floor(math.log2(num_heads))
        slopes = [*_powers(power), *_powers(2 * power)[::2]][:num_heads]
        return cls(tuple(map(float, slopes)), rounds, multiplier)

    @classmethod
    def of_max_bias(cls, num_heads: int, max_bias: float) -> Alibi:
        """MPT's slopes: of the next power of two, every other one first.

        Args:
          num_heads: H.
          max_bias: The last slope is two to its negative.
        """
        power = 2 ** math.ceil(math.log2(num_heads))
        slopes = [2.0 ** -(max_bias * i / power) for i in range(1, power + 1)]
        return cls(tuple(slopes if power == num_heads else (slopes[1::2] + slopes[::2])[:num_heads]))

    def dims_with(self, head_dim: int) -> int:
        """Dimensions of a query or key of D of its own: the native kernel takes whole tiles."""
        return -(-(head_dim + _NUM_PARTS) // ATTENTION_TILE) * ATTENTION_TILE

    def extend(self, q: jax.Array, k: jax.Array, positions: jax.Array, *, scale: float) -> tuple[jax.Array, jax.Array]:
        """Queries and keys [T, H, D] at positions i32 [T] -> the same with `dims_with(D)` dimensions.

        Args:
          q: Queries.
          k: Keys, of as many heads.
          positions: Of the tokens.
          scale: What multiplies the scores.
        """
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
    """To what bfloat16 holds; a cast there and back XLA may leave out."""
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def _powers(num_heads: int) -> np.ndarray:
    """Slopes of a power of two of heads: float32 powers of a base, as the reference computes them."""
    return (np.float64(np.float32(2.0 ** -(8 / num_heads))) ** np.arange(1, num_heads + 1)).astype(np.float32)
