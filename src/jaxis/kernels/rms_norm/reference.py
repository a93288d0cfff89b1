"""The definition: root-mean-square norm in plain JAX, computed in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, weight: jax.Array, *, epsilon: float) -> jax.Array:
    """Same arguments and result as `jaxis.kernels.rms_norm.rms_norm`."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon)
    # Rounded to the weight's type before the weight is applied, as published models were trained.
    return ((wide * scale).astype(weight.dtype) * weight).astype(x.dtype)
