"""What is added to the products of linear layers, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxis.kernels.low_rank import LowRankStack, low_rank
from jaxis.layers.module import JaxModule


class StepRows(JaxModule):
    """Which of their slots the additions of a model use for each row of a step.

    Attributes:
      slots: i32 [T], from 0, which means none, to S.
    """

    def __init__(self) -> None:
        self.slots = nnx.Variable(jnp.zeros(1, jnp.int32))


class LowRankAddition(JaxModule):
    """Adds `b.T @ (a @ x)` to a layer's product, with the matrices of the row's slot.

    Args:
      num_slots: S.
      rank: r, of a slot at most.
      input_size: Features in.
      output_size: Features out.
      rows: The slots of rows; all additions of a model share it.
      dtype: The matrices' type, float32 or bfloat16.
    """

    def __init__(
        self, num_slots: int, rank: int, input_size: int, output_size: int, rows: StepRows, dtype: DTypeLike
    ) -> None:
        self.a = nnx.Variable(jnp.zeros((num_slots, rank, input_size), dtype))
        self.b = nnx.Variable(jnp.zeros((num_slots, rank, output_size), dtype))
        self.ranks = nnx.Variable(jnp.zeros(num_slots, jnp.int32))
        self.rows = rows

    @property
    def stack(self) -> LowRankStack:
        """The matrices."""
        return LowRankStack(self.a.get_value(), self.b.get_value(), self.ranks.get_value())


class LookupAddition(JaxModule):
    """Adds `b.T @ a[id]` to an embedding that is looked up, with the matrices of the row's slot.

    Args:
      num_slots: S.
      rank: r, of a slot at most.
      num_embeddings: V.
      features: E.
      rows: The slots of rows; see `LowRankAddition`.
      dtype: The matrices' type, float32 or bfloat16.
    """

    def __init__(
        self, num_slots: int, rank: int, num_embeddings: int, features: int, rows: StepRows, dtype: DTypeLike
    ) -> None:
        self.a = nnx.Variable(jnp.zeros((num_slots, num_embeddings, rank), dtype))
        self.b = nnx.Variable(jnp.zeros((num_slots, rank, features), dtype))
        self.ranks = nnx.Variable(jnp.zeros(num_slots, jnp.int32))
        self.rows = rows

    def __call__(self, input_ids: jax.Array) -> jax.Array:
        """input_ids [T] -> float32 [T, E]."""
        slots, a, b = self.rows.slots.get_value(), self.a.get_value(), self.b.get_value()
        u = a[jnp.maximum(slots - 1, 0), input_ids]
        # The rows of the identity as the first matrix: the sums of a row are in an order of their own, as in layers.
        identity = jnp.broadcast_to(jnp.eye(a.shape[2], dtype=a.dtype), (len(a), a.shape[2], a.shape[2]))
        [product] = low_rank(u, slots, [LowRankStack(identity, b, self.ranks.get_value())])
        return product


class _Adds(Protocol):
    output_size: int
    addition: LowRankAddition | None


def addends_of(x: jax.Array, layers: Sequence[_Adds]) -> list[jax.Array] | None:
    """What is added to the product of each layer with x [T, in], float32 [T, out]; None: nothing to any of them."""
    found = [layer.addition for layer in layers if layer.addition is not None]
    if not found:
        return None
    products = iter(low_rank(x, found[0].rows.slots.get_value(), [each.stack for each in found]))
    return [
        jnp.zeros((len(x), layer.output_size), jnp.float32) if layer.addition is None else next(products)
        for layer in layers
    ]
