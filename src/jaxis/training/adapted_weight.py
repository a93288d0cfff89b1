from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxis.kernels.weights import Allocate, Weight, WeightValue, as_weight, dequantize, matmul


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AdaptedWeight(Weight):
    """A frozen weight [out, in] with a trained change, `base + scale * b a` (LoRA, arXiv:2106.09685).

    Attributes:
      base: Frozen weight [out, in], in any format.
      a: float32 [r, in].
      b: float32 [out, r].
      dropout: Share of the input's elements that are zeroed before `a`; the others are scaled up.
      key: Random key of the dropout; None: no dropout.
    """

    base: WeightValue
    a: jax.Array
    b: jax.Array
    scale: float = field(metadata={"static": True})
    dropout: float = field(default=0.0, metadata={"static": True})
    key: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return as_weight(self.base).shape

    @property
    def storage(self) -> str:
        return as_weight(self.base).storage

    def matmul(self, x: jax.Array, preferred_element_type: DTypeLike | None = None) -> jax.Array:
        seen = x.astype(jnp.float32)
        if self.key is not None and self.dropout:
            kept = jax.random.bernoulli(self.key, 1 - self.dropout, x.shape)
            seen = jnp.where(kept, seen / (1 - self.dropout), 0.0)
        [change] = _changes_of([self], seen)
        return self._changed_by(x, change, preferred_element_type)

    def fused_matmul(
        self,
        x: jax.Array,
        weights: Sequence[AdaptedWeight],
        addends: Sequence[jax.Array] = (),
        factors: Sequence[jax.Array] = (),
    ) -> list[jax.Array] | None:
        if addends or factors or any(weight.key is not None and weight.dropout for weight in weights):
            return None
        changes = _changes_of(weights, x.astype(jnp.float32))
        return [weight._changed_by(x, change, None) for weight, change in zip(weights, changes, strict=True)]

    def _changed_by(self, x: jax.Array, change: jax.Array, dtype: DTypeLike | None) -> jax.Array:
        y = matmul(x, self.base, preferred_element_type=jnp.float32)
        return (y + change).astype(dtype or x.dtype)

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        base = dequantize(self.base, jnp.float32)
        return (base + self.scale * (self.b @ self.a)).astype(dtype)

    def pack(self, dtype: DTypeLike = jnp.float32, allocate: Allocate | None = None) -> None:
        """Returns None: the native kernels have no derivatives."""
        del dtype, allocate

    def with_key(self, key: jax.Array) -> AdaptedWeight:
        return dataclasses.replace(self, key=key)


def _changes_of(weights: Sequence[AdaptedWeight], x: jax.Array) -> list[jax.Array]:
    changes: Any = _changes(tuple(each.scale for each in weights), x, [w.a for w in weights], [w.b for w in weights])
    return changes


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _changes(
    scales: tuple[float, ...], x: jax.Array, a: Sequence[jax.Array], b: Sequence[jax.Array]
) -> list[jax.Array]:
    """Multiplies x [..., in] by several pairs of low-rank matrices: one float32 [..., out] for each pair.

    JAX's own derivatives transpose the large cotangents of the products, which takes longer than the products.
    """
    return _forward(scales, x, a, b)[0]


_Kept = tuple[jax.Array, Sequence[jax.Array], Sequence[jax.Array], list[jax.Array]]


def _forward(
    scales: tuple[float, ...], x: jax.Array, a: Sequence[jax.Array], b: Sequence[jax.Array]
) -> tuple[list[jax.Array], _Kept]:
    # One product with all of them: each by itself is too thin for matrix kernels.
    hidden = jnp.split(jnp.einsum("...i,ri->...r", x, jnp.concatenate(a)), _ends(a), axis=-1)
    hidden = [scale * each for scale, each in zip(scales, hidden, strict=True)]
    changes = [jnp.einsum("...r,or->...o", each, matrix) for each, matrix in zip(hidden, b, strict=True)]
    return changes, (x, a, b, hidden)


def _backward(
    scales: tuple[float, ...], kept: _Kept, cotangents: list[jax.Array]
) -> tuple[jax.Array, list[jax.Array], list[jax.Array]]:
    x, a, b, hidden = kept
    of_b = [jnp.einsum("...r,...o->ro", each, dy).T for each, dy in zip(hidden, cotangents, strict=True)]
    of_hidden = jnp.concatenate(
        [scale * jnp.einsum("...o,or->...r", dy, each) for scale, dy, each in zip(scales, cotangents, b, strict=True)],
        axis=-1,
    )
    of_a = jnp.split(jnp.einsum("...r,...i->ri", of_hidden, x), _ends(a))
    return jnp.einsum("...r,ri->...i", of_hidden, jnp.concatenate(a)), of_a, of_b


def _ends(a: Sequence[jax.Array]) -> list[int]:
    return np.cumsum([len(each) for each in a])[:-1].tolist()


_changes.defvjp(_forward, _backward)
