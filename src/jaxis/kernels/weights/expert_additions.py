"""What is added to the products of a layer of experts: pairs of thin matrices, another for each slot of a token."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxis.kernels.low_rank import LowRankStack, low_rank


class ExpertAdditions(NamedTuple):
    """Pairs of matrices of X experts, several times, one after the other.

    Attributes:
      slots: i32 [T, k]: of each token's slots, the number of their pair, from 1 on; 0: nothing is added.
      gate: From E to F; None if the experts have no gate.
      up: From E to F.
      down: From F to E.
    """

    slots: jax.Array
    gate: LowRankStack | None
    up: LowRankStack
    down: LowRankStack

    def of_hidden(self, x: jax.Array, slots: jax.Array) -> tuple[jax.Array | None, jax.Array]:
        """What is added to gate and up of rows x [N, E] with these slots [N]: float32 [N, F]; without a gate, None."""
        stacks = [self.up] if self.gate is None else [self.gate, self.up]
        *gate, up = _by_slot(x, slots, stacks)
        return (gate[0] if gate else None), up

    def of_outputs(self, hidden: jax.Array, slots: jax.Array) -> jax.Array:
        """What is added to the outputs of rows hidden [N, F] with these slots [N]: float32 [N, E]."""
        [down] = _by_slot(hidden, slots, [self.down])
        return down


def _by_slot(x: jax.Array, slots: jax.Array, stacks: list[LowRankStack]) -> list[jax.Array]:
    """`low_rank` with the rows of a pair after each other, which then is read from memory once."""
    order = jnp.argsort(slots)
    products = low_rank(x[order], slots[order], stacks)
    return [jnp.zeros_like(y).at[order].set(y) for y in products]
