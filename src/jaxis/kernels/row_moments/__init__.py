"""Mean and variance over the last axis."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxis.kernels.row_moments import cpu, reference

__all__ = ["row_moments"]


def row_moments(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean and variance of each row, computed in float32 with sums that do not depend on the number of rows.

    Args:
      x: [..., N], N at least 1.

    Returns:
      float32 [..., 1] each; the variance is the mean square of the differences to the mean.
    """
    wide = x.astype(jnp.float32)
    return cpu.row_moments(wide) if cpu.is_usable() else reference.row_moments(wide)
