"""The definition: layer norm in plain JAX, computed in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array | None, *, epsilon: float) -> jax.Array:
    """Same arguments and result as `jaxis.kernels.layer_norm.layer_norm`."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + epsilon)
    y = centred * scale * weight.astype(jnp.float32)
    return (y if bias is None else y + bias.astype(jnp.float32)).astype(x.dtype)
