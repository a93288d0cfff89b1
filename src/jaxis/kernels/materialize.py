from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxis.kernels import native


def materialize(x: jax.Array) -> jax.Array:
    """Returns x unchanged, but rounded to its type.

    XLA on CPU may fuse a product with a following sum and skip the rounding between them, in the program for one batch
    size but not for another. With native kernels, this function prevents that; without them it does nothing.
    """
    return _materialize(x) if native.usable() else x


def _kernel(x: jax.Array) -> jax.Array:
    return native.call("materialize", jax.ShapeDtypeStruct(x.shape, x.dtype), x, aliases={0: 0})


_materialize = native.transformable(_kernel, lambda x: x)


_LANES = 16  # float32 elements of the widest vector register


def in_whole_vectors(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Returns function(x), float32 [..., N], for an elementwise function such as an exponential or a logarithm.

    XLA on CPU computes the elements that fill a vector register with other instructions than the few left over, and
    rounds them differently: a row's last bits would depend on the rows beside it. With native kernels, which promise
    that they do not, rows are padded to whole registers. The function's value at 0.5, the padding, must be defined.
    """
    if not native.usable():
        return function(x)
    size = x.shape[-1]
    padding = [(0, 0)] * (x.ndim - 1) + [(0, -size % _LANES)]
    padded = jnp.pad(x, padding, constant_values=0.5)
    return materialize(function(materialize(padded)))[..., :size]
