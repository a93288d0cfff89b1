"""The logit at which top-k, top-p and min-p cut a row off, found exactly without sorting.

Every one of the three keeps the tokens from some logit upwards, so together they are one threshold. It is found by
bisection over the float's bit pattern, which reaches the exact element in at most 32 halvings.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

# Below every float's key: where a search over all tokens starts.
LOWEST_KEY = -(2**31)
# Probabilities are summed as integers in this unit's fractions, so that the sum, and with it the set of tokens kept,
# is exact and the same in whatever order and batch the hardware adds. A row's total is under 2**30 plus half a unit
# a token, which int32 holds.
MASS_BITS = 30


def float_to_key(x: jax.Array) -> jax.Array:
    """Float32 -> int32 of the same shape and order; both zeros map to 0."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def key_to_float(key: jax.Array) -> jax.Array:
    """The inverse of `float_to_key`."""
    return jax.lax.bitcast_convert_type(jnp.where(key < 0, key ^ 0x7FFFFFFF, key), jnp.float32)


def mass_scale(total_weight: jax.Array) -> jax.Array:
    """A power of two that brings a row's total weight to between 2**29 and 2**30: float32 [R] -> [R]."""
    biased_exponent = jax.lax.bitcast_convert_type(total_weight, jnp.int32) >> 23
    return jax.lax.bitcast_convert_type((MASS_BITS - 1 + 2 * 127 - biased_exponent) << 23, jnp.float32)


def largest_key_reaching(
    keys: jax.Array, masses: jax.Array | int, target: jax.Array, low: jax.Array, high: jax.Array
) -> jax.Array:
    """The largest key such that the elements from it upwards weigh at least the target.

    Args:
      keys: int32 [R, C].
      masses: int32 [R, C], or one number for all.
      target: int32 [R], at least 1.
      low: int32 [R]; the answer where no key above it reaches the target.
      high: int32 [R]; a key above every element's. A row whose `high` is at most `low + 1` answers `low` at no cost.

    Returns:
      int32 [R].
    """

    def unsettled(bounds: tuple[jax.Array, jax.Array]) -> jax.Array:
        low, high = bounds
        return jnp.any(low + 1 < high)

    def halve(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        reached = jnp.sum(jnp.where(keys >= middle[:, None], masses, 0), axis=-1) >= target
        reached |= middle <= low
        return jnp.where(reached, middle, low), jnp.where(reached, high, middle)

    return jax.lax.while_loop(unsettled, halve, (low, jnp.maximum(low, high)))[0]
