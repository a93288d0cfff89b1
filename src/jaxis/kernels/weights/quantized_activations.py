"""Quantization of activations to int8 while a program runs, in groups of features."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxis.kernels.native_constants import ACTIVATION_GROUP


def quantize_activations(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Quantizes x [..., in] to int8 q [..., in], with float32 scales and midpoints [..., ceil(in / ACTIVATION_GROUP)].

    x ~ scale * q + midpoint. In each group of ACTIVATION_GROUP features (the last may be shorter) the midpoint is
    (max + min) / 2, the scale (max - min) / 254, and q round-half-even((x - midpoint) / scale), from -127 to 127; 0
    where all features of a group are equal.
    """
    x = x.astype(jnp.float32)
    missing = -x.shape[-1] % ACTIVATION_GROUP
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)], mode="edge" if x.shape[-1] else "constant")
    grouped = padded.reshape(*x.shape[:-1], -1, ACTIVATION_GROUP)
    highest, lowest = jnp.max(grouped, axis=-1), jnp.min(grouped, axis=-1)
    midpoint, scale = (highest + lowest) * 0.5, divide(highest - lowest, 254)
    q = (grouped - midpoint[..., None]) / jnp.where(scale > 0, scale, 1)[..., None]
    # Clipped: with a range of a few units in the last place, the midpoint is off by a part of it.
    q = jnp.where(scale[..., None] > 0, jnp.clip(jnp.rint(q), -127, 127), 0)
    return q.astype(jnp.int8).reshape(padded.shape)[..., : x.shape[-1]], scale, midpoint


def round_activations(x: jax.Array, dtype: DTypeLike | None = None) -> jax.Array:
    """Quantizes and dequantizes x [..., in], in `dtype`, by default x's type.

    Its derivative is that of x (straight through, arXiv:1308.3432): with that of rounding, earlier layers would learn
    nothing.
    """
    return _rounded(x, jnp.dtype(dtype or x.dtype))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _rounded(x: jax.Array, dtype: np.dtype) -> jax.Array:
    q, scale, midpoint = (a.astype(jnp.float32) for a in quantize_activations(x))
    wide = [jnp.repeat(a, ACTIVATION_GROUP, axis=-1)[..., : x.shape[-1]] for a in (scale, midpoint)]
    return (q * wide[0] + wide[1]).astype(dtype)


@_rounded.defjvp
def _rounded_jvp(dtype: np.dtype, primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return _rounded(*primals, dtype), tangents[0].astype(dtype)


def divide(x: jax.Array, divisor: float) -> jax.Array:
    """Returns x / divisor, correctly rounded: XLA would multiply by a constant's reciprocal, which rounds once more."""
    return x / jax.lax.optimization_barrier(jnp.full_like(x, divisor))
