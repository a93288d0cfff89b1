"""Gated units of experts, as data: gated linear units, and a plain activation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxis.kernels.activations import KERNEL_NAMES, relu_squared
from jaxis.kernels.materialize import in_whole_vectors


@dataclass(frozen=True)
class GLU:
    """`activation(gate) * up` (arXiv:2002.05202), with one of `layers.mlp.ACTIVATIONS`."""

    activation: Callable[[jax.Array], jax.Array]

    @property
    def has_gate(self) -> bool:
        return True

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        return self.activation(gate) * up

    @property
    def kernel_arguments(self) -> Mapping[str, Any] | None:
        name = KERNEL_NAMES.get(self.activation)
        return None if name is None else {"activation": name}


@dataclass(frozen=True)
class ClampedGLU:
    """`g * sigmoid(alpha * g) * (u + 1)`, with g = `min(gate, limit)` and u = `clip(up, -limit, limit)` (GPT-OSS)."""

    limit: float
    alpha: float = 1.702

    @property
    def has_gate(self) -> bool:
        return True

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        gate = jnp.minimum(gate, self.limit)
        up = jnp.clip(up, -self.limit, self.limit)
        return gate * jax.nn.sigmoid(self.alpha * gate) * (up + 1)

    @property
    def kernel_arguments(self) -> Mapping[str, Any] | None:
        return {"activation": "clamped_swiglu", "alpha": self.alpha, "limit": self.limit}


@dataclass(frozen=True)
class CappedGLU:
    """`min(activation(gate), limit) * clip(up, -limit, limit)` (Step 3.5), with one of `layers.mlp.ACTIVATIONS`."""

    activation: Callable[[jax.Array], jax.Array]
    limit: float

    @property
    def has_gate(self) -> bool:
        return True

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        return jnp.minimum(self.activation(gate), self.limit) * jnp.clip(up, -self.limit, self.limit)

    @property
    def kernel_arguments(self) -> Mapping[str, Any] | None:
        return {"activation": "capped_swiglu", "limit": self.limit} if self.activation is jax.nn.silu else None


@dataclass(frozen=True)
class LimitedGLU:
    """`silu(min(gate, limit)) * clip(up, -limit, limit)` (DeepSeek V4)."""

    limit: float

    @property
    def has_gate(self) -> bool:
        return True

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        return jax.nn.silu(jnp.minimum(gate, self.limit)) * jnp.clip(up, -self.limit, self.limit)

    @property
    def kernel_arguments(self) -> Mapping[str, Any] | None:
        return {"activation": "limited_swiglu", "limit": self.limit}


@dataclass(frozen=True)
class SiTU:
    """`beta * tanh(gate / beta) * sigmoid(gate) * u`, in float32 (Kimi K3).

    u is `linear_beta * tanh(up / linear_beta)`, or `up` without a `linear_beta`.
    """

    beta: float
    linear_beta: float | None = None

    @property
    def has_gate(self) -> bool:
        return True

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        u, g = up.astype(jnp.float32), gate.astype(jnp.float32)
        if self.linear_beta is not None:
            u = self.linear_beta * in_whole_vectors(jnp.tanh, u / self.linear_beta)
        unit = in_whole_vectors(lambda x: self.beta * jnp.tanh(x / self.beta) * jax.nn.sigmoid(x), g)
        return (unit * u).astype(up.dtype)

    @property
    def kernel_arguments(self) -> Mapping[str, Any] | None:
        return {"activation": "situ", "alpha": self.beta, "limit": self.linear_beta or 0.0}


@dataclass(frozen=True)
class Ungated:
    """`activation(up)`, for experts without a gate, with one of `layers.mlp.ACTIVATIONS`."""

    activation: Callable[[jax.Array], jax.Array]

    @property
    def has_gate(self) -> bool:
        return False

    def __call__(self, gate: None, up: jax.Array) -> jax.Array:
        del gate
        return self.activation(up)

    @property
    def kernel_arguments(self) -> Mapping[str, Any] | None:
        return {"activation": "relu2"} if self.activation is relu_squared else None
