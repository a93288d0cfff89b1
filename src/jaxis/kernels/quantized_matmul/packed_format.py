"""PackedFormat: how the elements of packed weights are stored, as the native kernels are told."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxis.kernels.native_constants import MAX_LEVELS, SCALE_TYPES, WEIGHT_TYPES


@dataclass(frozen=True)
class PackedFormat:
    """The format of packed weights. Weights of one format can be multiplied in one kernel call.

    All but the first three are of "codes" only, whose elements are `scale * (value - zero_point) + minimum`; see
    CodedWeight.

    Attributes:
      qtype: A key of WEIGHT_TYPES.
      in_size: Columns.
      group_size: Columns that share a scale; 0 if each row has one scale or none.
      bits: Bits of a packed code: 4, 5, 6 or 8.
      offset: What is subtracted from a code.
      scale: Type of the scales, a key of SCALE_TYPES; so are `minimum` and `super_scale`.
      minimum: Type of the groups' minima; "none" if there are none.
      has_zero_points: Whether each group has a zero point, a byte.
      super_scale: Type of the super-scales, and of the super-minima where there are minima.
      super_block: Columns that share a super-scale.
      levels: The value of each code.
      act_qtype: "int8" quantizes the input of products dynamically; None does not.
    """

    qtype: str
    in_size: int
    group_size: int = 0
    bits: int = 0
    offset: int = 0
    scale: str = "none"
    minimum: str = "none"
    has_zero_points: bool = False
    super_scale: str = "none"
    super_block: int = 0
    levels: tuple[float, ...] | None = None
    act_qtype: str | None = None

    def encode(self) -> np.ndarray:
        """The format as the kernels take it: int64 numbers, without `in_size`, which they know from their operands."""
        levels = np.zeros(MAX_LEVELS, np.float32)
        if self.levels is not None:
            levels[: len(self.levels)] = self.levels
        fields = [
            WEIGHT_TYPES[self.qtype],
            self.group_size,
            self.bits,
            self.offset,
            SCALE_TYPES[self.scale],
            SCALE_TYPES[self.minimum],
            self.has_zero_points,
            SCALE_TYPES[self.super_scale],
            self.super_block,
            self.levels is not None,
        ]
        return np.concatenate([np.asarray(fields, np.int64), levels.view(np.uint32).astype(np.int64)])
