"""Additions of adapters to the products of linear layers, selected row by row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jaxis.kernels.low_rank import LowRankStack, low_rank
from jaxis.kernels.weights import ExpertAdditions, WeightValue, fused_matmul, matmul
from jaxis.layers.module import JaxModule

Matrix = TypeVar("Matrix", np.ndarray, jax.Array)

SCALES = "scales"
"""Part of adapters with factors other than 1 of outputs."""
EXPERTS = "experts"
"""Part of adapters with matrices of experts."""


class StepRows(JaxModule):
    """Adapter places `slots` of each row: i32 [T], from 0, which means no adapter, to S, or [1] for all rows.

    `parts` has the parts of the current adapters besides the matrices of layers: SCALES, EXPERTS. Missing parts cost
    nothing.
    """

    def __init__(self) -> None:
        self.parts: frozenset[str] = frozenset()
        self.slots = nnx.Variable(jnp.zeros(1, jnp.int32))

    def of(self, num_rows: int) -> jax.Array:
        """Returns the adapter places of a step with `num_rows` rows, i32 [T]."""
        return jnp.broadcast_to(self.slots.get_value(), (num_rows,))


class LowRankAddition(JaxModule):
    """Adds `b.T @ (a @ x)` to a layer's product, with the matrices of the row's adapter, and scales the outputs.

    There are `num_slots` S adapter places, of ranks up to `rank` r. `rows` is shared by all additions of a model.
    Matrices are float32 or bfloat16.
    """

    def __init__(
        self, num_slots: int, rank: int, input_size: int, output_size: int, rows: StepRows, dtype: DTypeLike
    ) -> None:
        self.a = nnx.Variable(jnp.zeros((num_slots, rank, input_size), dtype))
        self.b = nnx.Variable(jnp.zeros((num_slots, rank, output_size), dtype))
        self.factors = nnx.Variable(jnp.ones((num_slots, output_size), jnp.float32))
        self.output_size = output_size
        self.ranks = nnx.Variable(jnp.zeros(num_slots, jnp.int32))
        self.rows = rows

    @property
    def stack(self) -> LowRankStack:
        return LowRankStack(self.a.get_value(), self.b.get_value(), self.ranks.get_value())

    def changed_product(
        self,
        x: jax.Array,
        weight: WeightValue,
        preferred_element_type: DTypeLike | None,
        axes: tuple[str | None, str | None],
    ) -> jax.Array:
        """Returns the layer's product with x [T, in], changed; the arguments are those of `kernels.weights.matmul`."""
        changes, dtype = changes_of(x, [self]), preferred_element_type or x.dtype
        if dtype == x.dtype and (fused := fused_matmul(x, [weight], *changes)) is not None:
            return fused[0]
        y = matmul(x, weight, preferred_element_type=jnp.float32, axes=axes)
        y = y[..., : self.output_size] + changes.addends[0]  # several devices may have padding rows
        return (y * changes.factors[0] if changes.factors else y).astype(dtype)

    def entries(self, a: Matrix, b: Matrix) -> dict[str, Matrix]:
        """Returns an adapter's entry of each table, for a change `b.T @ a` with a [r, in] and b [r, out]."""
        return {"a": a, "b": b}


class LookupAddition(JaxModule):
    """Adds `b.T @ a[id]` to looked-up embeddings of a table [V, E], with the row's adapter, and scales features."""

    def __init__(
        self, num_slots: int, rank: int, num_embeddings: int, features: int, rows: StepRows, dtype: DTypeLike
    ) -> None:
        self.a = nnx.Variable(jnp.zeros((num_slots, num_embeddings, rank), dtype))
        self.b = nnx.Variable(jnp.zeros((num_slots, rank, features), dtype))
        self.factors = nnx.Variable(jnp.ones((num_slots, features), jnp.float32))
        self.ranks = nnx.Variable(jnp.zeros(num_slots, jnp.int32))
        self.rows = rows

    def change(self, embeddings: jax.Array, input_ids: jax.Array) -> jax.Array:
        """Returns the changed embeddings, float32 [T, E], of embeddings [T, E] of input_ids [T]."""
        slots, a, b = self.rows.of(len(input_ids)), self.a.get_value(), self.b.get_value()
        u = a[jnp.maximum(slots - 1, 0), input_ids]
        changed = embeddings.astype(jnp.float32) + _combined(u, slots, b, self.ranks.get_value())
        return changed * factors_of(slots, self.factors) if SCALES in self.rows.parts else changed

    def entries(self, a: Matrix, b: Matrix) -> dict[str, Matrix]:
        return {"a": a.T, "b": b}


class HeadwiseAddition(JaxModule):
    """Adds `b.T @ a` to the matrix [H * (N + V), L] from a latent to keys and values of H heads; scales its rows."""

    def __init__(
        self,
        num_slots: int,
        rank: int,
        latent_dim: int,
        key_dim: int,
        value_dim: int,
        num_heads: int,
        rows: StepRows,
        dtype: DTypeLike,
    ) -> None:
        self.num_heads, self.key_dim = num_heads, key_dim
        self.a = nnx.Variable(jnp.zeros((num_slots, rank, latent_dim), dtype))
        self.keys = nnx.Variable(jnp.zeros((num_slots, num_heads, rank, key_dim), dtype))
        self.values = nnx.Variable(jnp.zeros((num_slots, num_heads, rank, value_dim), dtype))
        self.factors = nnx.Variable(jnp.ones((num_slots, num_heads, key_dim + value_dim), jnp.float32))
        self.ranks = nnx.Variable(jnp.zeros(num_slots, jnp.int32))
        self.rows = rows

    def scaled_queries(self, queries: jax.Array) -> jax.Array:
        """Scales queries [T, H, N] like the rows of the keys' matrices."""
        if SCALES not in self.rows.parts:
            return queries
        factors = factors_of(self.rows.slots.get_value(), self.factors)[..., : self.key_dim]
        return (queries.astype(jnp.float32) * factors).astype(queries.dtype)

    def scaled_values(self, values: jax.Array) -> jax.Array:
        """Multiplies values float32 [T, H, V] by the factors of each row's adapter, if adapters scale outputs."""
        if SCALES not in self.rows.parts:
            return values
        return values * factors_of(self.rows.slots.get_value(), self.factors)[..., self.key_dim :]

    def of_queries(self, queries: jax.Array) -> jax.Array:
        """Returns the products of queries [T, H, N] with the change of each head's keys, float32 [T, H, L]."""
        of_heads, of_rows = self._slots(len(queries))
        u = _reduced(_rows_of_heads(queries), of_heads, _stacked(self.keys), self._ranks_of_heads)
        product = _combined(u, of_rows, self.a.get_value(), self.ranks.get_value())
        return product.reshape(*queries.shape[:2], -1)

    def of_latents(self, latents: jax.Array) -> jax.Array:
        """Returns the change of each head's value, float32 [T, H, V], for one latent per head [T, H, L]."""
        of_heads, of_rows = self._slots(len(latents))
        u = _reduced(_rows_of_heads(latents), of_rows, self.a.get_value(), self.ranks.get_value())
        product = _combined(u, of_heads, _stacked(self.values), self._ranks_of_heads)
        return product.reshape(*latents.shape[:2], -1)

    def entries(self, a: Matrix, b: Matrix) -> dict[str, Matrix]:
        heads = b.reshape(len(b), self.num_heads, -1).swapaxes(0, 1)
        return {"a": a, "keys": heads[..., : self.key_dim], "values": heads[..., self.key_dim :]}

    def _slots(self, num_tokens: int) -> tuple[jax.Array, jax.Array]:
        """Returns the places of each token and head, [T * H]: first counted by heads, then as they are."""
        slots = self.rows.of(num_tokens)[:, None]
        of_heads = (slots - 1) * self.num_heads + 1 + jnp.arange(self.num_heads, dtype=jnp.int32)
        return jnp.where(slots == 0, 0, of_heads).reshape(-1), jnp.repeat(slots[:, 0], self.num_heads)

    @property
    def _ranks_of_heads(self) -> jax.Array:
        return jnp.repeat(self.ranks.get_value(), self.num_heads)


class ExpertTables(JaxModule):
    """Matrices of one projection of X experts, for each `b.T @ a`; `rank` r is an adapter's largest of any expert."""

    def __init__(
        self, num_slots: int, num_experts: int, rank: int, input_size: int, output_size: int, dtype: DTypeLike
    ) -> None:
        self.a = nnx.Variable(jnp.zeros((num_slots, num_experts, rank, input_size), dtype))
        self.b = nnx.Variable(jnp.zeros((num_slots, num_experts, rank, output_size), dtype))
        self.ranks = nnx.Variable(jnp.zeros((num_slots, num_experts), jnp.int32))

    @property
    def stack(self) -> LowRankStack:
        """Matrices, with an adapter's experts one after the other."""
        return LowRankStack(_stacked(self.a), _stacked(self.b), self.ranks.get_value().reshape(-1))


class ExpertsAddition(JaxModule):
    """Adds to the products of X experts, with the matrices of the row's adapter.

    `sizes` has the features in and out of each projection; `gate_proj` may be missing.
    """

    gate_proj: ExpertTables | None = None
    up_proj: ExpertTables
    down_proj: ExpertTables

    def __init__(
        self,
        num_slots: int,
        rank: int,
        num_experts: int,
        sizes: Mapping[str, tuple[int, int]],
        rows: StepRows,
        dtype: DTypeLike,
    ) -> None:
        for name, (size_in, size_out) in sizes.items():
            setattr(self, name, ExpertTables(num_slots, num_experts, rank, size_in, size_out, dtype))
        self.num_experts = num_experts
        self.rows = rows

    def of(self, expert_ids: jax.Array) -> ExpertAdditions | None:
        """Returns the additions to products of experts i32 [T, k] of a step's tokens; None if there are none."""
        if EXPERTS not in self.rows.parts:
            return None
        gate = None if self.gate_proj is None else self.gate_proj.stack
        up, down = self.up_proj.stack, self.down_proj.stack
        slots = self.rows.of(len(expert_ids))[:, None]
        pairs = (slots - 1) * self.num_experts + expert_ids
        has_pair = (slots > 0) & (expert_ids < self.num_experts)
        # Without matrices of these experts, as without an adapter, sums are not touched.
        ranks = up.ranks + down.ranks + (0 if gate is None else gate.ranks)
        has_pair &= ranks[jnp.where(has_pair, pairs, 0)] > 0
        return ExpertAdditions(jnp.where(has_pair, pairs + 1, 0).astype(jnp.int32), gate, up, down)


def _rows_of_heads(x: jax.Array) -> jax.Array:
    return x.reshape(-1, x.shape[-1])


def _stacked(table: nnx.Variable) -> jax.Array:
    array = table.get_value()
    return array.reshape(-1, *array.shape[2:])


def _reduced(x: jax.Array, slots: jax.Array, a: jax.Array, ranks: jax.Array) -> jax.Array:
    """Returns `a[s] @ x[t]`, float32 [T, r], for x [T, in] and a [S, r, in].

    This is `low_rank` with the identity as b, so that a row's sum has an order of its own, as in layers.
    """
    [product] = low_rank(x, slots, [LowRankStack(a, _identities(a), ranks)])
    return product


def _combined(u: jax.Array, slots: jax.Array, b: jax.Array, ranks: jax.Array) -> jax.Array:
    """Returns `b[s].T @ u[t]`, float32 [T, out], for u [T, r] and b [S, r, out]: `low_rank` with the identity as a."""
    [product] = low_rank(u, slots, [LowRankStack(_identities(b), b, ranks)])
    return product


def _identities(matrices: jax.Array) -> jax.Array:
    num_slots, rank, _ = matrices.shape
    return jnp.broadcast_to(jnp.eye(rank, dtype=matrices.dtype), (num_slots, rank, rank))


def factors_of(slots: jax.Array, table: nnx.Variable) -> jax.Array:
    """Returns the factors [T, ...] of rows with places [T] in a table [S, ...]; 1 for rows without an adapter."""
    factors = table.get_value()[jnp.maximum(slots - 1, 0)]
    return jnp.where((slots == 0).reshape(-1, *[1] * (factors.ndim - 1)), 1.0, factors)


class ProductChanges(NamedTuple):
    """Changes of layers' products: `(y + addend) * factor`, float32 [T, out] per layer; none if the list is empty."""

    addends: Sequence[jax.Array] = ()
    factors: Sequence[jax.Array] = ()


class _Adds(Protocol):
    output_size: int
    addition: LowRankAddition | None


def changes_of(x: jax.Array, layers: Sequence[_Adds | LowRankAddition]) -> ProductChanges:
    """Returns the changes of each layer's product with x [T, in]."""
    additions = [layer if isinstance(layer, LowRankAddition) else layer.addition for layer in layers]
    found = [addition for addition in additions if addition is not None]
    if not found:
        return ProductChanges()
    rows = found[0].rows
    slots, shapes = rows.of(len(x)), [(len(x), layer.output_size) for layer in layers]
    products = iter(low_rank(x, slots, [each.stack for each in found]))
    addends = [
        jnp.zeros(shape, jnp.float32) if addition is None else next(products)
        for shape, addition in zip(shapes, additions, strict=True)
    ]
    if SCALES not in rows.parts:
        return ProductChanges(addends)
    factors = [
        jnp.ones(shape, jnp.float32) if addition is None else factors_of(slots, addition.factors)
        for shape, addition in zip(shapes, additions, strict=True)
    ]
    return ProductChanges(addends, factors)
