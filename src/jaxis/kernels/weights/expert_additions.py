"""Additions of adapters to the products of a layer of experts: low-rank pairs, selected per expert slot of a token."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxis.kernels.low_rank import LowRankStack, low_rank


class ExpertAdditions(NamedTuple):
    """Low-rank pairs of X experts, for several adapters one after the other.

    Attributes:
      slots: i32 [T, k], for each token's expert slots the number of the pair, from 1 on; 0: nothing is added.
      gate: Pairs from E to F; None if the experts have no gate.
      up: Pairs from E to F.
      down: Pairs from F to E.
    """

    slots: jax.Array
    gate: LowRankStack | None
    up: LowRankStack
    down: LowRankStack

    def of_hidden(self, x: jax.Array, slots: jax.Array) -> tuple[jax.Array | None, jax.Array]:
        """Returns the additions to gate (None without one) and up of rows x [N, E] with slots [N]: float32 [N, F]."""
        stacks = [self.up] if self.gate is None else [self.gate, self.up]
        *gate, up = _by_slot(x, slots, stacks)
        return (gate[0] if gate else None), up

    def of_outputs(self, hidden: jax.Array, slots: jax.Array) -> jax.Array:
        """Returns the additions to the outputs of rows hidden [N, F] with slots [N]: float32 [N, E]."""
        [down] = _by_slot(hidden, slots, [self.down])
        return down


def _by_slot(x: jax.Array, slots: jax.Array, stacks: list[LowRankStack]) -> list[jax.Array]:
    order = jnp.argsort(slots)
    products = low_rank(x[order], slots[order], stacks)
    return [jnp.zeros_like(y).at[order].set(y) for y in products]
