"""Gates in plain JAX: the definitions."""

from __future__ import annotations

import jax
import jax.numpy as jnp

ACTIVATIONS = {"sigmoid": jax.nn.sigmoid, "silu": jax.nn.silu, "softplus": jax.nn.softplus}
"""What a gate makes of its logit, by name."""


def softplus(x: jax.Array, bias: jax.Array) -> jax.Array:
    """Same arguments and result as `jaxis.kernels.gates.softplus`."""
    return jax.nn.softplus(x + bias)


def gated(x: jax.Array, logits: jax.Array, activation: str) -> jax.Array:
    """Same arguments and result as `jaxis.kernels.gates.gated`."""
    factors = ACTIVATIONS[activation](logits.astype(jnp.float32))
    out = x.astype(jnp.float32).reshape(*logits.shape, -1) * factors[..., None]
    return out.reshape(x.shape).astype(x.dtype)


def softmax(x: jax.Array) -> jax.Array:
    """Same arguments and result as `jaxis.kernels.gates.softmax`."""
    return jax.nn.softmax(x, axis=-1)
