from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.kernels import native, native_states
from jaxis.kernels.causal_conv import reference
from jaxis.kernels.causal_conv.reference import ConvOperands
from jaxis.kernels.native_constants import ACTIVATIONS

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def supports(x: jax.Array) -> bool:
    return native.usable() and x.dtype in DTYPES


def causal_conv(operands: ConvOperands, *, activation: str | None) -> tuple[jax.Array | None, jax.Array]:
    kernel, definition = (functools.partial(each, activation=activation) for each in (_kernel, reference.causal_conv))
    x, width = operands.x, operands.weight.shape[1]
    empty = jax.ShapeDtypeStruct((0, width - 1, x.shape[1]), x.dtype)
    return native_states.in_place_or_whole(kernel, definition, operands, empty)


def _kernel(operands: ConvOperands, *, activation: str | None) -> tuple[jax.Array, jax.Array]:
    x, weight, bias, states = operands
    bias = jnp.zeros(0) if bias is None else bias
    inputs = (x, weight.astype(jnp.float32), bias.astype(jnp.float32))
    state, y = native_states.call(
        "causal_conv",
        inputs,
        states,
        x.shape,
        activation=np.int32(ACTIVATIONS[activation or "none"]),
    )
    return state, y.astype(x.dtype)
