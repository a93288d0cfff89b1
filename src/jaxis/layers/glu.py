"""Gated linear units as data: how an expert combines its gate and up projections."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxis.kernels.activations import KERNEL_NAMES


@dataclass(frozen=True)
class GLU:
    """`activation(gate) * up` (arXiv:2002.05202).

    Attributes:
      activation: Applied to the gate; one of `layers.mlp.ACTIVATIONS`.
    """

    activation: Callable[[jax.Array], jax.Array]

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """gate, up [..., F] -> [..., F]."""
        return self.activation(gate) * up

    @property
    def kernel_arguments(self) -> Mapping[str, Any] | None:
        """See `GatedUnit`."""
        name = KERNEL_NAMES.get(self.activation)
        return None if name is None else {"activation": name}


@dataclass(frozen=True)
class ClampedGLU:
    """`g * sigmoid(alpha * g) * (u + 1)`, with g = `min(gate, limit)` and u = `clip(up, -limit, limit)` (GPT-OSS).

    Attributes:
      limit: The bound.
      alpha: Steepness of the sigmoid; 1.702 makes it an approximation of GELU.
    """

    limit: float
    alpha: float = 1.702

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """gate, up [..., F] -> [..., F]."""
        gate = jnp.minimum(gate, self.limit)
        up = jnp.clip(up, -self.limit, self.limit)
        return gate * jax.nn.sigmoid(self.alpha * gate) * (up + 1)

    @property
    def kernel_arguments(self) -> Mapping[str, Any] | None:
        """See `GatedUnit`."""
        return {"activation": "clamped_swiglu", "alpha": self.alpha, "limit": self.limit}
