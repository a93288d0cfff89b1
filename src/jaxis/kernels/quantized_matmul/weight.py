"""QuantizedWeight: a matrix of low-precision integers and their scales."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import numpy as np

BITS = {"int8": 8, "int6": 6, "int5": 5, "int4": 4}
"""Type of quantized weights -> bits of an element."""
INT4_OFFSET = 8
"""The offset added to a stored symmetric int4 value, so that a nibble is unsigned."""


@dataclass(frozen=True)
class WeightScheme:
    """How a weight and the input of its products are quantized.

    Attributes:
      weight_qtype: A key of BITS.
      group_size: Input features that share a scale; None means all of them.
      weight_calibration_method: How scales are chosen: "absmax", "minmax", "mse" or "affine"; see `quantize`.
      act_qtype: "int8" quantizes the input of its products dynamically; None does not.
    """

    weight_qtype: str
    group_size: int | None = None
    weight_calibration_method: str = "absmax"
    act_qtype: str | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedWeight:
    """A weight [out, in], or a stack of weights, as `scale * (qvalue - zero_point)`, one scale for each group of a row.

    Attributes:
      qvalue: int8 [..., out, in]; or uint8 [..., out, in / 2], two unsigned 4-bit elements a byte, the earlier in the
        low nibble.
      scale: [..., out, groups], each for in / groups neighbouring columns; float32 if a row is one group, else bfloat16
        (or float32 or float16, in some checkpoints).
      zero_point: uint8 [..., out, groups], int4 only. None means symmetric: int8 is stored as it is, int4 with
        INT4_OFFSET added.
      act_qtype: "int8" quantizes the input of its products dynamically; None does not.
    """

    qvalue: jax.Array | np.ndarray
    scale: jax.Array | np.ndarray
    zero_point: jax.Array | np.ndarray | None = None
    act_qtype: str | None = field(default=None, metadata={"static": True})

    @property
    def qtype(self) -> str:
        """ "int8" or "int4"."""
        return "int8" if self.qvalue.dtype == np.int8 else "int4"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape (..., out, in) of the dequantized weight."""
        *leading, columns = self.qvalue.shape
        return (*leading, columns if self.qtype == "int8" else 2 * columns)

    @property
    def group_size(self) -> int:
        """Columns that share a scale."""
        return self.shape[-1] // self.scale.shape[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of all its arrays."""
        return sum(array.nbytes for array in (self.qvalue, self.scale, self.zero_point) if array is not None)
