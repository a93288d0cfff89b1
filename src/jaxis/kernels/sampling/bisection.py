"""Exact selection by weight without sorting: bisection over the bit patterns of floats.

Floats of one sign are ordered like their bits, so at most 32 halvings find the exact element, each with a masked sum.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def largest_value_reaching(
    values: jax.Array, masses: jax.Array | int, target: jax.Array, maximum: jax.Array
) -> jax.Array:
    """Returns the largest value of each row such that the elements from it upwards weigh at least the target.

    float32 [R]; -inf if the whole row does not reach the target. Values are float32 [R, C], no NaN, with masses int32
    [R, C], or one for all. Rows with a target, int32 [R], of 0 or less give -inf at no cost. `maximum`, float32 [R],
    has the largest value of each row.
    """
    keys = _float_to_key(values)
    low = _float_to_key(jnp.full_like(maximum, -jnp.inf))
    high = jnp.where(target > 0, _float_to_key(maximum) + 1, low)

    def unsettled(bounds: tuple[jax.Array, jax.Array]) -> jax.Array:
        low, high = bounds
        return jnp.any(low + 1 < high)

    def halve(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        reached = jnp.sum(jnp.where(keys >= middle[:, None], masses, 0), axis=-1) >= target
        reached |= middle <= low
        return jnp.where(reached, middle, low), jnp.where(reached, high, middle)

    return _key_to_float(jax.lax.while_loop(unsettled, halve, (low, high))[0])


def _float_to_key(x: jax.Array) -> jax.Array:
    """Converts float32 to int32 of the same shape and order; both zeros map to 0."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _key_to_float(key: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(jnp.where(key < 0, key ^ 0x7FFFFFFF, key), jnp.float32)
