"""Products of each token's heads with one matrix per head: how attention over latents absorbs projections."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxis.kernels.head_matmul import cpu
from jaxis.kernels.quantized_matmul.packed import PackedWeight

__all__ = ["head_matmul"]


def head_matmul(x: jax.Array, weight: jax.Array | PackedWeight) -> jax.Array:
    """`x[t, h] @ weight[h].T` for each token t and head h.

    Args:
      x: [T, H, in].
      weight: [H, out, in], or packed for the native kernel by `cpu.pack`.

    Returns:
      [T, H, out] in x's type.
    """
    if isinstance(weight, PackedWeight):
        return cpu.head_matmul(x, weight)
    return jnp.einsum("thi,hoi->tho", x, weight)
