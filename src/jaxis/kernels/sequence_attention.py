"""Attention of tokens to others of the same array, without a cache: what training computes.

In plain JAX; its derivative on CPU by native kernels, which keep nothing of the size of T * T.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.kernels import native
from jaxis.kernels.native_constants import ATTENTION_TILE, MAX_HEAD_DIM

_Operands = tuple[jax.Array, ...]


def sequence_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array, last: jax.Array, *, scale: float
) -> jax.Array:
    """Softmax attention, in which each token sees a range of tokens.

    Args:
      q: [T, H, D].
      k: [T, K, D], K a divisor of H.
      v: [T, K, D].
      first: int32 [T], the first token that each sees.
      last: int32 [T], the last one, which is not before the first.
      scale: Multiplies the scores.

    Returns:
      [T, H, D].
    """
    if not _has_native_derivative(q, k, v):
        return _definition(scale, q, k, v, first, last)
    return _differentiable(scale)(q, k, v, first, last)


def visible_tokens(first: jax.Array, last: jax.Array) -> jax.Array:
    """Which tokens each token sees, bool [T, T], of the ranges that `sequence_attention` takes."""
    token = jnp.arange(first.shape[0])
    return (token >= first[:, None]) & (token <= last[:, None])


def _has_native_derivative(q: jax.Array, k: jax.Array, v: jax.Array) -> bool:
    head_dim = q.shape[-1]
    return (
        native.usable()
        and all(each.dtype in (jnp.float32, jnp.bfloat16) for each in (q, k, v))
        and k.shape == v.shape
        and head_dim % ATTENTION_TILE == 0
        and head_dim <= MAX_HEAD_DIM
    )


def _definition(scale: float, q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array, last: jax.Array) -> jax.Array:
    visible = visible_tokens(first, last)
    return jax.nn.dot_product_attention(q[None], k[None], v[None], mask=visible[None, None], scale=scale)[0]


@functools.cache
def _differentiable(scale: float) -> Callable[..., jax.Array]:
    """The definition, whose derivative the native kernels compute, of mapped rows as of one array."""
    call = functools.partial(native.call, scale=np.float32(scale))

    @_of_mapped_rows
    def forward_kernel(*operands: jax.Array) -> _Operands:
        q = operands[0]
        log_sums = jax.ShapeDtypeStruct(q.shape[:2], jnp.float32)
        return tuple(call("sequence_attention", (_like(q), log_sums), *operands))

    @_of_mapped_rows
    def gradient_kernel(*operands: jax.Array) -> _Operands:
        return tuple(call("sequence_attention_gradient", [_like(each) for each in operands[:3]], *operands))

    attention = jax.custom_vjp(functools.partial(_definition, scale))

    def forward(*operands: jax.Array) -> tuple[jax.Array, _Operands]:
        out, log_sums = forward_kernel(*map(_as_float32, operands))
        return out.astype(operands[0].dtype), (*operands, out, log_sums)

    def backward(kept: _Operands, cotangent: jax.Array) -> tuple[jax.Array | None, ...]:
        gradients = gradient_kernel(*map(_as_float32, (*kept, cotangent)))
        return *(each.astype(of.dtype) for each, of in zip(gradients, kept[:3], strict=True)), None, None

    attention.defvjp(forward, backward)
    return attention


def _as_float32(array: jax.Array) -> jax.Array:
    return array.astype(jnp.float32) if array.dtype == jnp.bfloat16 else array


def _like(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _of_mapped_rows(kernel: Callable[..., _Operands]) -> Callable[..., _Operands]:
    """A kernel of (q, k, v, first, last, ...), called once for all rows that `jax.vmap` maps over: they become one
    array, in which each row's tokens see their own."""
    mapped = jax.custom_batching.custom_vmap(kernel)

    @mapped.def_vmap
    def vmap(axis_size: int, is_batched: Sequence[bool], *operands: jax.Array) -> tuple[_Operands, Any]:
        rows = [
            each if batched else jnp.broadcast_to(each, (axis_size, *each.shape))
            for each, batched in zip(operands, is_batched, strict=True)
        ]
        num_tokens = rows[0].shape[1]
        starts = num_tokens * jnp.arange(axis_size, dtype=jnp.int32)[:, None]
        rows[3:5] = [each + starts for each in rows[3:5]]
        outputs = mapped(*(each.reshape(-1, *each.shape[2:]) for each in rows))
        return tuple(each.reshape(axis_size, num_tokens, *each.shape[1:]) for each in outputs), (True,) * len(outputs)

    return mapped
