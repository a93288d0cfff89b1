"""Mamba2's recurrence on CPU: a native kernel that computes token by token, so that bits do not depend on steps."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxis.kernels import native_states
from jaxis.kernels.ssd import reference
from jaxis.kernels.ssd.reference import SsdOperands


def ssd(operands: SsdOperands) -> tuple[jax.Array | None, jax.Array]:
    empty = jax.ShapeDtypeStruct((0, *operands.state_shape), jnp.float32)
    return native_states.in_place_or_whole(_kernel, reference.ssd, operands, empty)


def _kernel(operands: SsdOperands) -> tuple[jax.Array, jax.Array]:
    x, dt, a, b, c, d, states = operands
    d = jnp.zeros(0) if d is None else d
    inputs = tuple(operand.astype(jnp.float32) for operand in (x, dt, a, b, c, d))
    state, y = native_states.call("ssd", inputs, states, x.shape)
    return state, y.astype(x.dtype)
