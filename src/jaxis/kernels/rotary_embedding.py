"""Rotary position embedding (arXiv:2104.09864) of queries and keys, after their RMS norms where the model has them.

On CPU a native kernel computes it, elsewhere its definition in plain JAX.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.kernels import native
from jaxis.kernels.norms import rms_norm, rms_norm_definition


class HeadNorms(NamedTuple):
    """RMS norms over each head, with weights [D]."""

    q_weight: jax.Array
    k_weight: jax.Array
    epsilon: float


def rotary_embedding(
    q: jax.Array,
    k: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    interleaved: bool = False,
    norms: HeadNorms | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Rotates each pair of a head's first 2 * P dimensions by the token's angle for that pair, computed in float32.

    The results have the types of q [T, H, D] and k [T, K, D]. cos and sin are float32 [T, P], with P at most D / 2.
    Pairs are the dimensions (2i, 2i+1) if interleaved, else (i, i + P). Norms are applied to each head first.
    """
    if not native.usable():
        return rotary_embedding_definition(q, k, cos, sin, interleaved=interleaved, norms=norms)
    if norms is not None:
        operands = (q, k, norms.q_weight, norms.k_weight)
        if all(array.dtype == jnp.float32 for array in operands):
            return _native_with_norms(interleaved, norms.epsilon)(q, k, cos, sin, norms.q_weight, norms.k_weight)
        # Heads are rounded between the norm and the rope, as in the definition.
        q = rms_norm(q, norms.q_weight, epsilon=norms.epsilon)
        k = rms_norm(k, norms.k_weight, epsilon=norms.epsilon)
    rotated_q, rotated_k = _native(interleaved)(q.astype(jnp.float32), k.astype(jnp.float32), cos, sin)
    return rotated_q.astype(q.dtype), rotated_k.astype(k.dtype)


def rotary_embedding_definition(
    q: jax.Array, k: jax.Array, cos: jax.Array, sin: jax.Array, *, interleaved: bool, norms: HeadNorms | None
) -> tuple[jax.Array, jax.Array]:
    if norms is not None:
        q = rms_norm_definition(q, norms.q_weight, epsilon=norms.epsilon)
        k = rms_norm_definition(k, norms.k_weight, epsilon=norms.epsilon)
    return _apply_rope(q, cos, sin, interleaved), _apply_rope(k, cos, sin, interleaved)


def _apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array, interleaved: bool) -> jax.Array:
    """Rotates x [T, N, D] with cos and sin [T, P]."""
    rotary_dim = 2 * cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    rotated, rest = x[..., :rotary_dim].astype(jnp.float32), x[..., rotary_dim:]
    if interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    else:
        first, second = jnp.split(rotated, 2, axis=-1)
    pair = (first * cos - second * sin, second * cos + first * sin)
    if interleaved:
        rotated = jnp.stack(pair, axis=-1).reshape(rotated.shape)
    else:
        rotated = jnp.concatenate(pair, axis=-1)
    return jnp.concatenate([rotated.astype(x.dtype), rest], axis=-1)


@functools.cache
def _native(interleaved: bool):  # noqa: ANN202
    def kernel(q: jax.Array, k: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _call("rotary_embedding", q, k, cos, sin, interleaved=interleaved)

    return native.transformable(
        kernel, functools.partial(rotary_embedding_definition, interleaved=interleaved, norms=None)
    )


@functools.cache
def _native_with_norms(interleaved: bool, epsilon: float):  # noqa: ANN202
    def kernel(*operands: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _call("norm_rotary_embedding", *operands, interleaved=interleaved, epsilon=np.float32(epsilon))

    def definition(
        q: jax.Array, k: jax.Array, cos: jax.Array, sin: jax.Array, q_weight: jax.Array, k_weight: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        norms = HeadNorms(q_weight, k_weight, epsilon)
        return rotary_embedding_definition(q, k, cos, sin, interleaved=interleaved, norms=norms)

    return native.transformable(kernel, definition)


def _call(name: str, q: jax.Array, k: jax.Array, *operands: jax.Array, **attributes: Any) -> tuple:
    outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k)]
    # Not in place: the operands are slices of a product's output, which XLA would copy first.
    return tuple(native.call(name, outputs, q, k, *operands, **attributes))
