"""Functions of a token's logits: gates, softmax over experts, steps and decays of recurrent layers."""

from __future__ import annotations

import jax

from jaxis.kernels.gates import cpu, reference
from jaxis.kernels.gates.reference import ACTIVATIONS

__all__ = ["ACTIVATIONS", "gated", "softmax", "softplus"]


def softplus(x: jax.Array, bias: jax.Array) -> jax.Array:
    """`log(1 + exp(x + bias))`.

    Args:
      x: float32 [T, N].
      bias: float32 [N].

    Returns:
      float32 [T, N].
    """
    return cpu.softplus(x, bias) if cpu.is_usable() else reference.softplus(x, bias)


def gated(x: jax.Array, logits: jax.Array, activation: str) -> jax.Array:
    """`x * activation(logits)`, computed in float32.

    Args:
      x: [T, M].
      logits: [T, N]; M / N consecutive elements of x share a gate.
      activation: A key of ACTIVATIONS.

    Returns:
      [T, M] in x's type.
    """
    if cpu.is_usable():
        return cpu.gated(x, logits, activation)
    return reference.gated(x, logits, activation)


def softmax(x: jax.Array) -> jax.Array:
    """float32 [T, N] -> the same shape: each row's softmax."""
    return cpu.softmax(x) if cpu.is_usable() else reference.softmax(x)
