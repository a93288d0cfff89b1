"""Root-mean-square norm on CPU: the native kernel, which computes in float32."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.kernels import native
from jaxis.kernels.rms_norm import reference


def is_usable() -> bool:
    """Whether a program traced now may call the kernel."""
    return native.usable()


def rms_norm(x: jax.Array, weight: jax.Array, *, epsilon: float) -> jax.Array:
    """Same arguments and result as `jaxis.kernels.rms_norm.rms_norm`."""
    wide = x.astype(jnp.float32)
    if weight.dtype == jnp.float32:
        return _rms_norm(epsilon)(wide, weight).astype(x.dtype)
    # Rounded before the weight is applied, as in the definition.
    normalised = _rms_norm(epsilon)(wide, jnp.ones(weight.shape, jnp.float32)).astype(weight.dtype)
    return (normalised * weight).astype(x.dtype)


@functools.cache
def _rms_norm(epsilon: float):  # noqa: ANN202
    def kernel(x: jax.Array, weight: jax.Array) -> jax.Array:
        return native.call("rms_norm", jax.ShapeDtypeStruct(x.shape, x.dtype), x, weight, epsilon=np.float32(epsilon))

    return native.transformable(kernel, functools.partial(reference.rms_norm, epsilon=epsilon))
