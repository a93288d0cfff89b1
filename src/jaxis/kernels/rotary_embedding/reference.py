"""The definition: rotary embedding in plain JAX, computed in float32."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxis.kernels.rms_norm import reference as rms_norm_reference

# The RMS norms of queries and keys that some families apply before the rope.


class HeadNorms(NamedTuple):
    """RMS norms over each head.

    Attributes:
      q_weight: [D].
      k_weight: [D].
      epsilon: Added to the mean square.
    """

    q_weight: jax.Array
    k_weight: jax.Array
    epsilon: float


def rotary_embedding(
    q: jax.Array, k: jax.Array, cos: jax.Array, sin: jax.Array, *, interleaved: bool, norms: HeadNorms | None
) -> tuple[jax.Array, jax.Array]:
    """Same arguments and result as `jaxis.kernels.rotary_embedding.rotary_embedding`."""
    if norms is not None:
        q = rms_norm_reference.rms_norm(q, norms.q_weight, epsilon=norms.epsilon)
        k = rms_norm_reference.rms_norm(k, norms.k_weight, epsilon=norms.epsilon)
    return _apply_rope(q, cos, sin, interleaved), _apply_rope(k, cos, sin, interleaved)


def _apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array, interleaved: bool) -> jax.Array:
    """x [T, N, D]; cos and sin [T, P]."""
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
