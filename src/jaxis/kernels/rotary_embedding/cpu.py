"""Rotary embedding on CPU: the native kernel, which computes in float32."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.kernels import native
from jaxis.kernels.rms_norm.cpu import rms_norm
from jaxis.kernels.rotary_embedding import reference
from jaxis.kernels.rotary_embedding.reference import HeadNorms


def is_usable() -> bool:
    """Whether a program traced now may call the kernel."""
    return native.usable()


def rotary_embedding(
    q: jax.Array, k: jax.Array, cos: jax.Array, sin: jax.Array, *, interleaved: bool, norms: HeadNorms | None
) -> tuple[jax.Array, jax.Array]:
    """Same arguments and result as `jaxis.kernels.rotary_embedding.rotary_embedding`."""
    if norms is not None:
        operands = (q, k, norms.q_weight, norms.k_weight)
        if all(array.dtype == jnp.float32 for array in operands):
            return _with_norms(interleaved, norms.epsilon)(q, k, cos, sin, norms.q_weight, norms.k_weight)
        # Heads are rounded between the norm and the rope, as in the definition.
        q = rms_norm(q, norms.q_weight, epsilon=norms.epsilon)
        k = rms_norm(k, norms.k_weight, epsilon=norms.epsilon)
    rotated_q, rotated_k = _plain(interleaved)(q.astype(jnp.float32), k.astype(jnp.float32), cos, sin)
    return rotated_q.astype(q.dtype), rotated_k.astype(k.dtype)


@functools.cache
def _plain(interleaved: bool):  # noqa: ANN202
    def kernel(q: jax.Array, k: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _call("rotary_embedding", q, k, cos, sin, interleaved=interleaved)

    return native.transformable(
        kernel, functools.partial(reference.rotary_embedding, interleaved=interleaved, norms=None)
    )


@functools.cache
def _with_norms(interleaved: bool, epsilon: float):  # noqa: ANN202
    def kernel(*operands: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _call("norm_rotary_embedding", *operands, interleaved=interleaved, epsilon=np.float32(epsilon))

    def definition(
        q: jax.Array, k: jax.Array, cos: jax.Array, sin: jax.Array, q_weight: jax.Array, k_weight: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        norms = HeadNorms(q_weight, k_weight, epsilon)
        return reference.rotary_embedding(q, k, cos, sin, interleaved=interleaved, norms=norms)

    return native.transformable(kernel, definition)


def _call(name: str, q: jax.Array, k: jax.Array, *operands: jax.Array, **attributes: Any) -> tuple:
    outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k)]
    # Not in place: the operands are slices of a product's output, which XLA would copy first.
    return tuple(native.call(name, outputs, q, k, *operands, **attributes))
