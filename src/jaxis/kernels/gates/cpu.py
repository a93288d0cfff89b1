"""Gates on CPU: the native kernels.

XLA computes exponentials and logarithms of a few elements otherwise than of many, with other last bits; the kernels do
not, so that what a token gets does not depend on how many tokens are in a step.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.kernels import native
from jaxis.kernels.gates import reference
from jaxis.kernels.native_constants import GATES


def is_usable() -> bool:
    """Whether a program traced now may call the kernels."""
    return native.usable()


def _softplus(x: jax.Array, bias: jax.Array) -> jax.Array:
    return native.call("softplus", jax.ShapeDtypeStruct(x.shape, x.dtype), x, bias)


softplus = native.transformable(_softplus, reference.softplus)


def _softmax(x: jax.Array) -> jax.Array:
    return native.call("softmax", jax.ShapeDtypeStruct(x.shape, x.dtype), x)


softmax = native.transformable(_softmax, reference.softmax)


def gated(x: jax.Array, logits: jax.Array, activation: str) -> jax.Array:
    """Same arguments and result as `jaxis.kernels.gates.gated`."""
    return _gated(activation)(x.astype(jnp.float32), logits.astype(jnp.float32)).astype(x.dtype)


@functools.cache
def _gated(activation: str):  # noqa: ANN202
    def kernel(x: jax.Array, logits: jax.Array) -> jax.Array:
        return native.call("gated", jax.ShapeDtypeStruct(x.shape, x.dtype), x, logits, gate=np.int32(GATES[activation]))

    return native.transformable(kernel, functools.partial(reference.gated, activation=activation))
