"""Activation functions, and the names under which native kernels apply them to gates."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp


def gelu_tanh(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=True)


def relu_squared(x: jax.Array) -> jax.Array:
    """`max(x, 0) ** 2` (arXiv:2109.08668)."""
    return jnp.square(jax.nn.relu(x))


KERNEL_NAMES: dict[Callable[[jax.Array], jax.Array], str] = {jax.nn.silu: "silu", gelu_tanh: "gelu_tanh"}
