from __future__ import annotations

import jax
import jax.numpy as jnp


def scaled(x: jax.Array, factor: float) -> jax.Array:
    """Returns `x * factor` in x's type, multiplied in float32 and rounded once: the factor itself is not rounded."""
    return x if factor == 1 else (x.astype(jnp.float32) * factor).astype(x.dtype)
