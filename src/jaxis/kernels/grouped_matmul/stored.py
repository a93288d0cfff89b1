from __future__ import annotations

from dataclasses import dataclass, field

import jax
import numpy as np

INT4_OFFSET = 8
"""Offset of stored symmetric int4 elements, which makes a nibble unsigned."""
PAIRED = ("int4", "uint4", "e2m1")
"""Kinds of elements that are stored as two per byte."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StoredStack:
    """Weights [X, out, in] in the form that the TPU and GPU kernels read.

    An element stands for `scale of its block * (element - zero point) + minimum of its block`.

    Attributes:
      elements: [X, out, in], or uint8 [X, out, in / 2] for paired kinds, the earlier element in the low half of a byte.
      scale: [X, ceil(out / rows), ceil(in / columns)] for blocks of (rows, columns); None means 1.
      zero_point: uint8 in scale's shape, for "int4" only; None means INT4_OFFSET.
      minimum: Minima in scale's shape, for "uint4" only; None means 0.
      super_scale, super_minimum: float32 [X, out, 1], multiply `scale` and `minimum`; for "uint4" only; None means 1.
        With a minimum, both or neither are given.
      kind: Kind of the elements: "float" (any type of array), "int8", "int4", "uint4", "e4m3" or "e2m1".
      block_shape: (rows, columns) of a block; not more than (out, in).
    """

    elements: jax.Array | np.ndarray
    scale: jax.Array | np.ndarray | None = None
    zero_point: jax.Array | np.ndarray | None = None
    minimum: jax.Array | np.ndarray | None = None
    super_scale: jax.Array | np.ndarray | None = None
    super_minimum: jax.Array | np.ndarray | None = None
    kind: str = field(default="float", metadata={"static": True})
    block_shape: tuple[int, int] = field(default=(1, 1), metadata={"static": True})

    @property
    def parts(self) -> int:
        """P: the number of neighbouring columns that share an entry of `elements`."""
        return 2 if self.kind in PAIRED else 1

    @property
    def shape(self) -> tuple[int, int, int]:
        groups, rows, columns = self.elements.shape
        return groups, rows, columns * self.parts

    @property
    def stored_columns(self) -> int:
        """Number of entries in a row of `elements`."""
        return self.elements.shape[2]

    @property
    def stored_columns_a_scale(self) -> int:
        """Number of these entries that share a scale."""
        return self.stored_columns if self.scale is None else self.block_shape[1] // self.parts


def by_parts(x: jax.Array, parts: int) -> jax.Array:
    """Splits [N, in] into [P, N, in / P]: the features of the first element of each entry, then of the second."""
    return x.reshape(len(x), -1, parts).transpose(2, 0, 1)
