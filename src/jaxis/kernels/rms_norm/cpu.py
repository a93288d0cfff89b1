"""Root-mean-square norm on CPU: the native kernel."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.kernels import native
from jaxis.kernels.rms_norm import reference


def supports(x: jax.Array, weight: jax.Array) -> bool:
    """Whether the kernel takes these types."""
    return native.usable() and x.dtype == weight.dtype == jnp.float32


def rms_norm(x: jax.Array, weight: jax.Array, *, epsilon: float) -> jax.Array:
    """Same arguments and result as `jaxis.kernels.rms_norm.rms_norm`."""
    return _rms_norm(epsilon)(x, weight)


@functools.cache
def _rms_norm(epsilon: float):  # noqa: ANN202
    def kernel(x: jax.Array, weight: jax.Array) -> jax.Array:
        return native.call("rms_norm", jax.ShapeDtypeStruct(x.shape, x.dtype), x, weight, epsilon=np.float32(epsilon))

    return native.transformable(kernel, functools.partial(reference.rms_norm, epsilon=epsilon))
