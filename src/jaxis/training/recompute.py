from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Kept:
    """Arguments of a call, and the indices of the differentiated ones."""

    leaves: list[jax.Array]
    wanted: tuple[int, ...] = field(metadata={"static": True})


def recomputed(function: Callable[..., Any], axis_name: str | None, *arguments: Any) -> Any:
    """Calls a function of arrays, and computes it again for its derivatives, so that only arguments are kept in memory.

    `jax.checkpoint` saves no memory on CPU: XLA drops the barriers that delay recomputation. It then recomputes
    everything at once and holds all of it together. Here, recomputation is in a conditional whose predicate depends on
    the cotangent, so it cannot run earlier. `axis_name` is the `jax.vmap` axis over the call, if any, where a predicate
    for each batch row would make both branches run.
    """
    leaves, tree = jax.tree.flatten(arguments)

    @jax.custom_vjp
    def call(*leaves: jax.Array) -> Any:
        return function(*tree.unflatten(leaves))

    def forward(*primals: Any) -> tuple[Any, _Kept]:
        leaves = [primal.value for primal in primals]
        # Integers and booleans, such as an indexer's selection, can be marked too; they have no derivative.
        wanted = tuple(
            i
            for i, primal in enumerate(primals)
            if primal.perturbed and jnp.issubdtype(primal.value.dtype, jnp.floating)
        )
        return call(*leaves), _Kept(leaves, wanted)

    def backward(kept: _Kept, cotangent: Any) -> tuple[Any, ...]:
        known = [each for each in jax.tree.leaves(cotangent) if not isinstance(each, SymbolicZero)]
        cotangent = jax.tree.map(_instantiated, cotangent, is_leaf=lambda each: isinstance(each, SymbolicZero))
        values = [kept.leaves[i] for i in kept.wanted]

        def of_wanted(*values: jax.Array) -> Any:
            leaves = list(kept.leaves)
            for i, value in zip(kept.wanted, values, strict=True):
                leaves[i] = value
            return function(*tree.unflatten(leaves))

        first = jnp.ravel(max(known, key=np.size))[0]
        if axis_name is not None:
            first = jax.lax.pmax(first, axis_name)
        # False for NaN only, where all results are NaN anyway.
        found = jax.lax.cond(
            first == first,
            lambda: jax.vjp(of_wanted, *values)[1](cotangent),
            lambda: tuple(jnp.full_like(value, jnp.nan) for value in values),
        )
        gradients: list[Any] = [None] * len(kept.leaves)
        for i, gradient in zip(kept.wanted, found, strict=True):
            gradients[i] = gradient
        return tuple(gradients)

    call.defvjp(forward, backward, symbolic_zeros=True)
    return call(*leaves)


def _instantiated(cotangent: Any) -> Any:
    if isinstance(cotangent, SymbolicZero):
        zero: Any = cotangent
        return np.zeros(zero.shape, zero.dtype)
    return cotangent
