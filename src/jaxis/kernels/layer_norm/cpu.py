"""Layer norm on CPU: the native kernel."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.kernels import native
from jaxis.kernels.layer_norm import reference


def supports(x: jax.Array, weight: jax.Array, bias: jax.Array | None) -> bool:
    """Whether the kernel takes these types."""
    arrays = (x, weight) if bias is None else (x, weight, bias)
    return native.usable() and all(array.dtype == jnp.float32 for array in arrays)


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array | None, *, epsilon: float) -> jax.Array:
    """Same arguments and result as `jaxis.kernels.layer_norm.layer_norm`."""
    return _layer_norm(epsilon)(x, weight, jnp.zeros_like(weight) if bias is None else bias)


@functools.cache
def _layer_norm(epsilon: float):  # noqa: ANN202
    def kernel(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
        output = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return native.call("layer_norm", output, x, weight, bias, epsilon=np.float32(epsilon))

    return native.transformable(kernel, functools.partial(reference.layer_norm, epsilon=epsilon))
