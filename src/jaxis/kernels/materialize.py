"""Elementwise functions whose last bits do not depend on how many rows are computed together."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxis.kernels import native


def materialize(x: jax.Array) -> jax.Array:
    """Returns x unchanged, but rounded to its type.

    XLA on CPU may fuse a product with a following sum and skip the rounding between them, in the program for one batch
    size but not for another. With native kernels, this function prevents that; elsewhere it does nothing.
    """
    return _materialize(x) if native.usable() else x


def _kernel(x: jax.Array) -> jax.Array:
    return native.call("materialize", jax.ShapeDtypeStruct(x.shape, x.dtype), x, aliases={0: 0})


_materialize = native.transformable(_kernel, lambda x: x)


# Elementwise functions whose last bits do not depend on how many rows are computed together.


# float32 in the widest vector register there is.
_LANES = 16


def in_whole_vectors(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Applies an elementwise function, such as an exponential or a logarithm.

    XLA on CPU computes those elements of an array that fill a vector register with other instructions than the few that
    are left over, and rounds them otherwise: the same row would get other last bits among others than alone. Where
    native kernels promise that it does not, rows are padded to whole registers.

    Args:
      function: Takes and returns an array of any shape.
      x: float32 [..., N].

    Returns:
      function(x), float32 [..., N].
    """
    if not native.usable():
        return function(x)
    size = x.shape[-1]
    padding = [(0, 0)] * (x.ndim - 1) + [(0, -size % _LANES)]
    padded = jnp.pad(x, padding, constant_values=0.5)  # of which every function here has a value
    return materialize(function(materialize(padded)))[..., :size]
