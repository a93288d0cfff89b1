"""Rotary position embedding (arXiv:2104.09864) of queries and keys, after their RMS norms where the model has them."""

from __future__ import annotations

import jax

from jaxis.kernels.rotary_embedding import cpu, reference
from jaxis.kernels.rotary_embedding.reference import HeadNorms

__all__ = ["HeadNorms", "rotary_embedding"]


def rotary_embedding(
    q: jax.Array,
    k: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    interleaved: bool = False,
    norms: HeadNorms | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Rotates each pair of a head's first 2 * P dimensions by the token's angle for that pair, computed in float32.

    Args:
      q: [T, H, D].
      k: [T, K, D].
      cos: float32 [T, P], of the angles; P is at most D / 2.
      sin: float32 [T, P].
      interleaved: Pairs are dimensions (2i, 2i+1); otherwise (i, i + P).
      norms: Applied to each head first; None for none.

    Returns:
      q and k, rotated, in their dtypes.
    """
    if cpu.is_usable():
        return cpu.rotary_embedding(q, k, cos, sin, interleaved=interleaved, norms=norms)
    return reference.rotary_embedding(q, k, cos, sin, interleaved=interleaved, norms=norms)
