"""Elementwise functions of logits: gates, softmax over experts, and steps and decays of recurrent layers.

XLA on CPU computes exponentials and logarithms of a few elements with other instructions, and other last bits, than
those of many. The native kernels do not, so that a token's result does not depend on the number of tokens in a step.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.kernels import native
from jaxis.kernels.native_constants import GATES

ACTIVATIONS = {
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "softplus": jax.nn.softplus,
    "normal_cdf": jax.scipy.stats.norm.cdf,
}
"""Activation functions of gates, by name."""


def softplus(x: jax.Array, bias: jax.Array) -> jax.Array:
    """Computes `log(1 + exp(x + bias))` of x float32 [T, N] and bias float32 [N]."""
    return _native_softplus(x, bias) if native.usable() else _softplus_definition(x, bias)


def _softplus_definition(x: jax.Array, bias: jax.Array) -> jax.Array:
    return jax.nn.softplus(x + bias)


def _softplus_kernel(x: jax.Array, bias: jax.Array) -> jax.Array:
    return native.call("softplus", jax.ShapeDtypeStruct(x.shape, x.dtype), x, bias)


_native_softplus = native.transformable(_softplus_kernel, _softplus_definition)


def softmax(x: jax.Array) -> jax.Array:
    """Returns the softmax of each row of x, float32 [T, N]."""
    return _native_softmax(x) if native.usable() else _softmax_definition(x)


def _softmax_definition(x: jax.Array) -> jax.Array:
    return jax.nn.softmax(x, axis=-1)


def _softmax_kernel(x: jax.Array) -> jax.Array:
    return native.call("softmax", jax.ShapeDtypeStruct(x.shape, x.dtype), x)


_native_softmax = native.transformable(_softmax_kernel, _softmax_definition)


def gated(x: jax.Array, logits: jax.Array, activation: str) -> jax.Array:
    """Returns `x * activation(logits)`, computed in float32, [T, M] in x's type, for x [T, M] and logits [T, N].

    M / N consecutive elements of x share a gate; the activation is a key of ACTIVATIONS.
    """
    if not native.usable():
        return gated_definition(x, logits, activation)
    return _native_gated(activation)(x.astype(jnp.float32), logits.astype(jnp.float32)).astype(x.dtype)


def gated_definition(x: jax.Array, logits: jax.Array, activation: str) -> jax.Array:
    factors = ACTIVATIONS[activation](logits.astype(jnp.float32))
    out = x.astype(jnp.float32).reshape(*logits.shape, -1) * factors[..., None]
    return out.reshape(x.shape).astype(x.dtype)


@functools.cache
def _native_gated(activation: str):  # noqa: ANN202
    def kernel(x: jax.Array, logits: jax.Array) -> jax.Array:
        return native.call("gated", jax.ShapeDtypeStruct(x.shape, x.dtype), x, logits, gate=np.int32(GATES[activation]))

    return native.transformable(kernel, functools.partial(gated_definition, activation=activation))
