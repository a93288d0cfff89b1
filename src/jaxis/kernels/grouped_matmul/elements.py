"""Conversion of stored elements and scales to floats inside kernels. It is exact, for elements in bfloat16 too."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxis.kernels.grouped_matmul.stored import INT4_OFFSET


def to_floats(stored: jax.Array, kind: str, *, has_zero_point: bool = False) -> list[jax.Array]:
    """Converts entries of `StoredStack.elements` to P arrays of the entries' shape, one for each element of an entry.

    They are float32, but elements of plain arrays keep their type. Symmetric int4's zero point is subtracted unless the
    caller has a zero point to subtract.
    """
    if kind == "uint4":
        return [code.astype(jnp.float32) for code in _halves(stored)]
    if kind == "int4":
        offset = 0 if has_zero_point else INT4_OFFSET
        return [(code - offset).astype(jnp.float32) for code in _halves(stored)]
    if kind == "e2m1":
        return [_e2m1_to_float32(code) for code in _halves(stored)]
    return [stored if kind == "float" else stored.astype(jnp.float32)]


def scale_to_float32(scale: jax.Array) -> jax.Array:
    """Converts scales, zero points or minima to float32; uint16 are the bits of float16."""
    if scale.dtype == jnp.uint16:
        return _f16_to_float32(scale)
    if scale.dtype in (jnp.uint8, jnp.int8):
        scale = scale.astype(jnp.int32)
    return scale.astype(jnp.float32)


def e4m3_to_float32(bits: jax.Array) -> jax.Array:
    """Converts uint8 bits of float8_e4m3fn to float32, on processors without a conversion of their own."""
    wide = bits.astype(jnp.int32)
    magnitude = wide & 0x7F
    normal = jax.lax.bitcast_convert_type((magnitude << 20) + ((127 - 7) << 23), jnp.float32)
    value = jnp.where(magnitude < 8, magnitude.astype(jnp.float32) * 2.0**-9, normal)
    value = jnp.where(magnitude == 0x7F, jnp.nan, value)
    return jnp.where(wide < 0x80, value, -value)


def e8m0_to_float32(bits: jax.Array) -> jax.Array:
    """Converts uint8 bits of float8_e8m0fnu, powers of two, to float32; the least, 2**-127, becomes 0."""
    exponent = bits.astype(jnp.int32)
    return jnp.where(exponent == 0xFF, jnp.nan, jax.lax.bitcast_convert_type(exponent << 23, jnp.float32))


def _f16_to_float32(bits: jax.Array) -> jax.Array:
    """Converts uint16 bits of finite float16 to float32, on processors without float16."""
    wide = bits.astype(jnp.int32)
    magnitude = wide & 0x7FFF
    normal = jax.lax.bitcast_convert_type((magnitude << 13) + ((127 - 15) << 23), jnp.float32)
    value = jnp.where(magnitude < 0x400, magnitude.astype(jnp.float32) * 2.0**-24, normal)
    return jnp.where(wide < 0x8000, value, -value)


def _halves(pairs: jax.Array) -> tuple[jax.Array, jax.Array]:
    wide = pairs.astype(jnp.int32)
    return wide & 0xF, wide >> 4


def _e2m1_to_float32(code: jax.Array) -> jax.Array:
    # Twice the magnitudes 0, .5, 1, 1.5, 2, 3, 4, 6 lie on three lines, of which the highest counts.
    line = (code & 7).astype(jnp.float32)
    magnitude = jnp.maximum(jnp.maximum(line, 2 * line - 4), 4 * line - 16)
    return magnitude * jnp.where(code < 8, 0.5, -0.5)
