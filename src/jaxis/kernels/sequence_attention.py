"""Attention of tokens to others of the same array, without a cache, for training and image encoders.

It is computed in plain JAX. On CPU, native kernels compute its derivative, and attention without a derivative; they
keep nothing of the size of T * T.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.kernels import native
from jaxis.kernels.head_tiles import padded
from jaxis.kernels.native_constants import MAX_HEAD_DIM

_Operands = tuple[jax.Array, ...]


def sequence_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array, last: jax.Array, *, scale: float
) -> jax.Array:
    """Returns softmax attention [T, H, D] in which token t sees tokens first[t] to last[t], int32 [T], at least one.

    q is [T, H, D]; k and v are [T, K, D], K a divisor of H. `scale` multiplies the scores.
    """
    if not has_kernel(q, k, v):
        return _definition(scale, q, k, v, first, last)
    out = _differentiable(scale)(*map(padded, (q, k, v)), first, last)
    return out[..., : q.shape[-1]]


def kernel_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array, last: jax.Array, *, scale: float
) -> jax.Array:
    """Attends with some queries by the native kernel, without a derivative. `has_kernel` must be true.

    Takes q [Q, H, D], k and v float32 [K, T, D], by head, and the first and last token that each query sees, int32 [Q].
    D must be whole tiles (`head_tiles.py`). Returns [Q, H, D]. A query's output depends only on the tokens that it
    sees, and on where tiles of 16 queries begin among them.
    """
    out, _ = _call_forward(scale, _by_head(_as_float32(q)), k, v, first, last)
    return _by_head(out).astype(q.dtype)


def visible_tokens(first: jax.Array, last: jax.Array) -> jax.Array:
    """Returns bool [T, T]: the tokens that each token sees, from the ranges that `sequence_attention` takes."""
    token = jnp.arange(first.shape[0])
    return (token >= first[:, None]) & (token <= last[:, None])


def has_kernel(q: jax.Array, k: jax.Array, v: jax.Array) -> bool:
    """Returns whether native kernels compute attention, and its derivative, of q [T, H, D] and k and v [T, K, D]."""
    return (
        native.usable()
        and all(each.dtype in (jnp.float32, jnp.bfloat16) for each in (q, k, v))
        and k.shape == v.shape
        and q.shape[-1] <= MAX_HEAD_DIM
    )


def _definition(scale: float, q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array, last: jax.Array) -> jax.Array:
    visible = visible_tokens(first, last)
    return jax.nn.dot_product_attention(q[None], k[None], v[None], mask=visible[None, None], scale=scale)[0]


@functools.cache
def _differentiable(scale: float) -> Callable[..., jax.Array]:
    """Returns the definition with a derivative by native kernels; rows that `jax.vmap` maps over become one array."""
    forward_kernel = _of_mapped_rows(functools.partial(_call_forward, scale))

    @_of_mapped_rows
    def gradient_kernel(*operands: jax.Array) -> _Operands:
        outputs = [_like(each) for each in operands[:3]]
        return tuple(native.call("sequence_attention_gradient", outputs, *operands, scale=np.float32(scale)))

    attention = jax.custom_vjp(functools.partial(_definition, scale))

    def forward(*operands: jax.Array) -> tuple[jax.Array, _Operands]:
        rows, seen = [_by_head(_as_float32(each)) for each in operands[:3]], operands[3:]
        out, log_sums = forward_kernel(*rows, *seen)
        return _by_head(out).astype(operands[0].dtype), (*operands, out, log_sums)

    def backward(kept: _Operands, cotangent: jax.Array) -> tuple[jax.Array | None, ...]:
        q, k, v, cotangent = (_by_head(_as_float32(each)) for each in (*kept[:3], cotangent))
        gradients = gradient_kernel(q, k, v, *kept[3:], cotangent)
        return *(_by_head(each).astype(of.dtype) for each, of in zip(gradients, kept[:3], strict=True)), None, None

    attention.defvjp(forward, backward)
    return attention


def _call_forward(scale: float, *operands: jax.Array) -> _Operands:
    """Returns the output [H, T, D] of q [H, T, D], k and v [K, T, D] and the ranges, and [H, T] for its derivative."""
    q = operands[0]
    outputs = (_like(q), jax.ShapeDtypeStruct(q.shape[:2], jnp.float32))
    return tuple(native.call("sequence_attention", outputs, *operands, scale=np.float32(scale)))


def _by_head(array: jax.Array) -> jax.Array:
    return array.swapaxes(0, 1)


def _as_float32(array: jax.Array) -> jax.Array:
    return array.astype(jnp.float32) if array.dtype == jnp.bfloat16 else array


def _like(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _of_mapped_rows(kernel: Callable[..., _Operands]) -> Callable[..., _Operands]:
    """Wraps a kernel of (q, k, v, first, last, ...): one call computes all rows that `jax.vmap` maps over."""
    mapped = jax.custom_batching.custom_vmap(kernel)

    @mapped.def_vmap
    def vmap(axis_size: int, is_batched: Sequence[bool], *operands: jax.Array) -> tuple[_Operands, Any]:
        rows = [
            each if batched else jnp.broadcast_to(each, (axis_size, *each.shape))
            for each, batched in zip(operands, is_batched, strict=True)
        ]
        num_tokens = rows[3].shape[1]
        starts = num_tokens * jnp.arange(axis_size, dtype=jnp.int32)[:, None]
        rows[3:5] = [(each + starts)[:, None] for each in rows[3:5]]  # as if of one head
        joined = [each.swapaxes(0, 1).reshape(each.shape[1], -1, *each.shape[3:]) for each in rows]
        joined[3:5] = [each[0] for each in joined[3:5]]
        outputs = mapped(*joined)
        parted = [
            each.reshape(each.shape[0], axis_size, num_tokens, *each.shape[2:]).swapaxes(0, 1) for each in outputs
        ]
        return tuple(parted), (True,) * len(parted)

    return mapped
