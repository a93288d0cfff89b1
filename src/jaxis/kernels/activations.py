"""The activations that the native kernels implement, and their names there."""

from __future__ import annotations

from collections.abc import Callable

import jax


def gelu_tanh(x: jax.Array) -> jax.Array:
    """GELU by its tanh approximation."""
    return jax.nn.gelu(x, approximate=True)


KERNEL_NAMES: dict[Callable[[jax.Array], jax.Array], str] = {jax.nn.silu: "silu", gelu_tanh: "gelu_tanh"}
