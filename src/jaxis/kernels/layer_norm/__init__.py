"""Layer norm over the last axis (arXiv:1607.06450)."""

from __future__ import annotations

import jax

from jaxis.kernels.layer_norm import cpu, reference

__all__ = ["layer_norm"]


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array | None, *, epsilon: float) -> jax.Array:
    """`(x - mean(x)) / sqrt(variance(x) + epsilon) * weight + bias`, computed in float32.

    Args:
      x: [..., N].
      weight: [N], or [M, N] with separate weights for each row of x [..., M, N].
      bias: Same shape as the weight; None for none.
      epsilon: Added to the variance.

    Returns:
      [..., N] in x's type.
    """
    if cpu.is_usable():
        return cpu.layer_norm(x, weight, bias, epsilon=epsilon)
    return reference.layer_norm(x, weight, bias, epsilon=epsilon)
