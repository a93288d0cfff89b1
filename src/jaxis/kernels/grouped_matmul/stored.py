"""Stacks of weights as the TPU and GPU kernels read them: elements as they are stored, and what scales them."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.kernels.quantized_matmul.block_scaled import BlockScaledWeight
from jaxis.kernels.quantized_matmul.coded import CodedWeight
from jaxis.kernels.quantized_matmul.weight import QuantizedWeight

PAIRED = ("int4", "uint4", "e2m1")
"""Kinds of elements that are stored two a byte."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StoredStack:
    """Weights [X, out, in], as `scale of the block * (element - zero point) + minimum of the block`.

    Attributes:
      elements: [X, out, in], or uint8 [X, out, in / 2] if they are paired, the earlier in the low half of a byte.
      scale: [X, ceil(out / rows), ceil(in / columns)] for blocks of (rows, columns); None means 1.
      zero_point: uint8 of scale's shape, for "int4" only; None means INT4_OFFSET.
      minimum: Of scale's shape, for "uint4" only; None means 0.
      super_scale: float32 [X, out, 1], which multiplies `scale`, and is given for "uint4" only; None means 1.
      super_minimum: The same for `minimum`; there are both or none of the two if there is a minimum.
      kind: What the elements are: "float" (any type of array), "int8", "int4", "uint4", "e4m3" or "e2m1".
      block_shape: (rows, columns) of a block; not more than (out, in).
    """

    elements: jax.Array
    scale: jax.Array | None = None
    zero_point: jax.Array | None = None
    minimum: jax.Array | None = None
    super_scale: jax.Array | None = None
    super_minimum: jax.Array | None = None
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
            jnp.asarray(weight.qvalue),
            jnp.asarray(weight.scale),
            zero_point,
            kind=weight.qtype,
            block_shape=(1, columns),
        )
    if isinstance(weight, BlockScaledWeight):
        kind = {"float8_e4m3fn": "e4m3", "float4_e2m1fn": "e2m1"}[weight.qtype]
        rows, columns = (min(sizes) for sizes in zip(weight.block_shape, weight.shape[-2:], strict=True))
        if kind == "e2m1" and columns % 2:
            return None
        return StoredStack(jnp.asarray(weight.value), jnp.asarray(weight.scale), kind=kind, block_shape=(rows, columns))
    if isinstance(weight, CodedWeight):
        return _stored_codes(weight)
    if isinstance(weight, jax.Array | np.ndarray):
        return StoredStack(jnp.asarray(weight))
    return None


def _stored_codes(weight: CodedWeight) -> StoredStack | None:
    """A stack of codes of 4 bits that are numbers, as jaxis quantizes to int4, MLX and GGUF's Q4_1 too."""
    are_numbers = weight.bits == 4 and weight.levels is None and not weight.offset and weight.zero_point is None
    supers = [array for array in (weight.super_scale, weight.super_minimum) if array is not None]
    of_rows = all(array.shape[-1] == 1 for array in supers)
    as_many = not supers or len(supers) == 1 + (weight.minimum is not None)
    if not (are_numbers and of_rows and as_many) or weight.group_size % 2:
        return None
    arrays = (weight.minimum, weight.super_scale, weight.super_minimum)
    minimum, super_scale, super_minimum = (None if array is None else jnp.asarray(array) for array in arrays)
    return StoredStack(
        jnp.asarray(weight.codes),
        jnp.asarray(weight.scale),
        minimum=minimum,
        super_scale=super_scale,
        super_minimum=super_minimum,
        kind="uint4",
        block_shape=(1, weight.group_size),
    )


def by_parts(x: jax.Array, parts: int) -> jax.Array:
    """[N, in] -> [P, N, in / P]: the features that the first element of each entry multiplies, then the second's."""
    return x.reshape(len(x), -1, parts).transpose(2, 0, 1)
