"""Products with low-rank pairs of matrices, selected per row: the additions of adapters to the products of layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxis.kernels import native
from jaxis.kernels.native_constants import MAX_MATRICES


class LowRankStack(NamedTuple):
    """Pairs of one layer's matrices a [S, r, in] and b [S, r, out], float32 or bfloat16: S places of rank r at most.

    `ranks`, i32 [S], has the rank in each place; later rows of a and b do not count.
    """

    a: jax.Array
    b: jax.Array
    ranks: jax.Array


def low_rank(x: jax.Array, slots: jax.Array, stacks: Sequence[LowRankStack]) -> list[jax.Array]:
    """Returns `b[s].T @ (a[s] @ x[t])`, float32 [T, out], for x [T, in] and each stack, all of one type.

    The adapter place of row t is s = slots[t] - 1; the slots are i32 [T], from 0 to S, and rows with slot 0 get zeros.
    With native kernels, a row's bits depend on no other row.
    """
    x = x.astype(jnp.float32)
    if not native.usable():
        return [_definition(x, slots, stack) for stack in stacks]
    parts = (stacks[i : i + MAX_MATRICES] for i in range(0, len(stacks), MAX_MATRICES))
    return [product for part in parts for product in _native(x, slots, part)]


def _native(x: jax.Array, slots: jax.Array, stacks: Sequence[LowRankStack]) -> list[jax.Array]:
    return list(_native_products(x, slots, *(array for stack in stacks for array in stack)))


def _kernel(x: jax.Array, slots: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    outputs = [jax.ShapeDtypeStruct((x.shape[0], stack.b.shape[2]), jnp.float32) for stack in _stacks(arrays)]
    return tuple(native.call("low_rank", outputs, x, slots, *arrays))


def _definitions(x: jax.Array, slots: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(_definition(x, slots, stack) for stack in _stacks(arrays))


def _stacks(arrays: Sequence[jax.Array]) -> list[LowRankStack]:
    return [LowRankStack(*arrays[i : i + 3]) for i in range(0, len(arrays), 3)]


def _definition(x: jax.Array, slots: jax.Array, stack: LowRankStack) -> jax.Array:
    """Computes one stack's product in plain JAX, with rows sorted by place, so that matrices are read once."""
    num_slots, rank = stack.a.shape[:2]
    if num_slots == 1:
        u = jnp.where(jnp.arange(rank) < stack.ranks, x @ stack.a[0].astype(x.dtype).T, 0.0)
        return jnp.where(slots[:, None] == 1, u @ stack.b[0].astype(x.dtype), 0.0)
    slots = jnp.where(slots == 0, num_slots, slots - 1)
    order = jnp.argsort(slots)
    sizes = jnp.bincount(slots, length=num_slots + 1)[:num_slots].astype(jnp.int32)
    u = jax.lax.ragged_dot(x[order], jnp.swapaxes(stack.a, 1, 2).astype(x.dtype), sizes)
    of_row = jnp.append(stack.ranks, 0)[slots[order]]
    u = jnp.where(jnp.arange(rank) < of_row[:, None], u, 0.0)
    y = jax.lax.ragged_dot(u, stack.b.astype(x.dtype), sizes)
    y = jnp.where((slots[order] < num_slots)[:, None], y, 0.0)
    return jnp.zeros_like(y).at[order].set(y)


_native_products = native.transformable(_kernel, _definitions)
