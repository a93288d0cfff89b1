"""Root-mean-square norm over the last axis (arXiv:1910.07467)."""

from __future__ import annotations

import jax

from jaxis.kernels.rms_norm import cpu, reference

__all__ = ["rms_norm"]


def rms_norm(x: jax.Array, weight: jax.Array, *, epsilon: float) -> jax.Array:
    """`x / sqrt(mean(x ** 2) + epsilon) * weight`, computed in float32.

    Args:
      x: [..., N].
      weight: [N].
      epsilon: Added to the mean square.

    Returns:
      [..., N] in x's type.
    """
    if cpu.is_usable():
        return cpu.rms_norm(x, weight, epsilon=epsilon)
    return reference.rms_norm(x, weight, epsilon=epsilon)
