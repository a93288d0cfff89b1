"""Mamba's selective scan on CPU: a native kernel that computes token by token, so that bits do not depend on steps."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxis.kernels import native_states
from jaxis.kernels.selective_scan import reference
from jaxis.kernels.selective_scan.reference import ScanOperands


def selective_scan(operands: ScanOperands) -> tuple[jax.Array | None, jax.Array]:
    empty = jax.ShapeDtypeStruct((0, *operands.a.T.shape), jnp.float32)
    return native_states.in_place_or_whole(_kernel, reference.selective_scan, operands, empty)


def _kernel(operands: ScanOperands) -> tuple[jax.Array, jax.Array]:
    *inputs, states = operands
    x = operands.x
    inputs = tuple(operand.astype(jnp.float32) for operand in inputs)
    state, y = native_states.call("selective_scan", inputs, states, x.shape)
    return state, y.astype(x.dtype)
