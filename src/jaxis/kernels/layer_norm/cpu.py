"""Layer norm on CPU: the native kernel, which computes in float32."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.kernels import native
from jaxis.kernels.layer_norm import reference


def is_usable() -> bool:
    """Whether a program traced now may call the kernel."""
    return native.usable()


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array | None, *, epsilon: float) -> jax.Array:
    """Same arguments and result as `jaxis.kernels.layer_norm.layer_norm`."""
    bias = jnp.zeros_like(weight) if bias is None else bias
    return _layer_norm(epsilon)(*(array.astype(jnp.float32) for array in (x, weight, bias))).astype(x.dtype)


@functools.cache
def _layer_norm(epsilon: float):  # noqa: ANN202
    def kernel(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
        output = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return native.call("layer_norm", output, x, weight, bias, epsilon=np.float32(epsilon))

    return native.transformable(kernel, functools.partial(reference.layer_norm, epsilon=epsilon))
