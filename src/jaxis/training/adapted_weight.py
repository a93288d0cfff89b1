"""AdaptedWeight: a weight and the low-rank change that is trained beside it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxis.kernels.weights import Allocate, Weight, WeightValue, as_weight, dequantize, matmul


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AdaptedWeight(Weight):
    """A weight [out, in] that stands for `base + scale * b a` (LoRA, arXiv:2106.09685).

    Attributes:
      base: Stands for [out, in]; in any form.
      a: float32 [r, in].
      b: float32 [out, r].
      scale: Of the product of the two.
      dropout: The share of the input's elements that `a` does not see, drawn by `key`.
      key: None: it sees all.
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
        y = matmul(x, self.base, preferred_element_type=jnp.float32)
        seen = x.astype(jnp.float32)
        if self.key is not None and self.dropout:
            kept = jax.random.bernoulli(self.key, 1 - self.dropout, x.shape)
            seen = jnp.where(kept, seen / (1 - self.dropout), 0.0)
        change = jnp.einsum("...r,or->...o", jnp.einsum("...i,ri->...r", seen, self.a), self.b)
        return (y + self.scale * change).astype(preferred_element_type or x.dtype)

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        base = dequantize(self.base, jnp.float32)
        return (base + self.scale * (self.b @ self.a)).astype(dtype)

    def pack(self, dtype: DTypeLike = jnp.float32, allocate: Allocate | None = None) -> None:
        """The native kernels have no derivatives."""
        del dtype, allocate

    def with_key(self, key: jax.Array) -> AdaptedWeight:
        """The same with a key for what it drops."""
        return dataclasses.replace(self, key=key)
