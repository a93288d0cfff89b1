"""Stacks of weights as the TPU and GPU kernels read them: elements as they are stored, and what scales them."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.kernels.quantized_matmul.block_scaled import BlockScaledWeight
from jaxis.kernels.quantized_matmul.weight import QuantizedWeight

PAIRED = ("int4", "e2m1")
"""Kinds of elements that are stored two a byte."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StoredStack:
    """Weights [X, out, in], as `scale of the block * (element - zero point)`.

    Attributes:
      elements: [X, out, in], or uint8 [X, out, in / 2] if they are paired, the earlier in the low half of a byte.
      scale: [X, ceil(out / rows), ceil(in / columns)] for blocks of (rows, columns); None means 1.
      zero_point: uint8 of scale's shape, for "int4" only; None means INT4_OFFSET.
      kind: What the elements are: "float" (any type of array), "int8", "int4", "e4m3" or "e2m1".
      block_shape: (rows, columns) of a block; not more than (out, in).
    """

    elements: jax.Array
    scale: jax.Array | None = None
    zero_point: jax.Array | None = None
    kind: str = field(default="float", metadata={"static": True})
    block_shape: tuple[int, int] = field(default=(1, 1), metadata={"static": True})

    @property
    def parts(self) -> int:
        """P: neighbouring columns that share an entry of `elements`."""
        return 2 if self.kind in PAIRED else 1

    @property
    def shape(self) -> tuple[int, int, int]:
        """(X, out, in)."""
        groups, rows, columns = self.elements.shape
        return groups, rows, columns * self.parts

    @property
    def stored_columns(self) -> int:
        """Entries of a row of `elements`."""
        return self.elements.shape[2]

    @property
    def stored_columns_a_scale(self) -> int:
        """Those that share a scale."""
        return self.stored_columns if self.scale is None else self.block_shape[1] // self.parts


def stored_stack(weight: object) -> StoredStack | None:
    """A stack of weights [X, out, in] as the kernels read it; None if they have no code for its type."""
    if isinstance(weight, QuantizedWeight):
        columns = weight.group_size
        if weight.qtype == "int4" and columns % 2:
            return None
        zero_point = None if weight.zero_point is None else jnp.asarray(weight.zero_point)
        return StoredStack(
            jnp.asarray(weight.qvalue), jnp.asarray(weight.scale), zero_point, weight.qtype, (1, columns)
        )
    if isinstance(weight, BlockScaledWeight):
        kind = {"float8_e4m3fn": "e4m3", "float4_e2m1fn": "e2m1"}[weight.qtype]
        rows, columns = (min(sizes) for sizes in zip(weight.block_shape, weight.shape[-2:], strict=True))
        if kind == "e2m1" and columns % 2:
            return None
        return StoredStack(jnp.asarray(weight.value), jnp.asarray(weight.scale), None, kind, (rows, columns))
    if isinstance(weight, jax.Array | np.ndarray):
        return StoredStack(jnp.asarray(weight))
    return None


def by_parts(x: jax.Array, parts: int) -> jax.Array:
    """[N, in] -> [P, N, in / P]: the features that the first element of each entry multiplies, then the second's."""
    return x.reshape(len(x), -1, parts).transpose(2, 0, 1)
