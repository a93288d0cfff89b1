"""Format of packed weights, as the native kernels take it, and the arrays that they are packed from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxis.kernels.native_constants import CODE_UNIT, MAX_CODE_GROUP, MAX_LEVELS, SCALE_TYPES, WEIGHT_TYPES

GROUP_SIZES = (32, 64, 128)
"""Numbers of columns that share a scale, for low-bit integers and floats."""


@dataclass(frozen=True)
class PackedFormat:
    """Format of packed weights. Weights of one format can be multiplied in one kernel call.

    All attributes but `qtype` and `in_size` are for "codes", whose elements are
    `scale * (value - zero_point) + minimum` as in CodedWeight; floats and integers have `group_size`, too.

    Attributes:
      qtype: Key of WEIGHT_TYPES.
      group_size: Columns that share a scale; 0 if each row has one scale or none.
      bits: Bits of a packed code: 2, 4, 5, 6 or 8.
      scale: Type of the scales, a key of SCALE_TYPES; so are `minimum` and `super_scale`.
      minimum: Type of the groups' minima; "none" if there are none.
      super_scale: Type of the super-scales, and of the super-minima if there are minima.
      has_zero_points: True if each group has a zero point, a byte.
      super_block: Columns that share a super-scale.
      offset: Subtracted from a code.
      levels: Value of each code, instead of the code itself.
      act_qtype: "int8" quantizes the input of products dynamically; with "integers", it is already of whole numbers
        from -127 to 127; None does not.
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
        """Returns the format as int64 numbers for the kernels, without `in_size`, which their operands have."""
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


@dataclass(frozen=True)
class PanelSources:
    """Arrays that panels are packed from, in row order; `Pack` in native/src/matmul.h takes them.

    Attributes:
      data: [out, ...], the elements; for codes, their lower bits as uint8 or int8.
      scale: [out, groups]; None without scales.
      bits: Bits of a code in these arrays; 0 if elements are no codes. The attributes below are for codes only.
      high: uint8 [out, ...], the other bits.
      zero_point: uint8 [out, groups].
      minimum: [out, groups].
      super_scale, super_minimum: [out, super-blocks].
    """

    data: np.ndarray
    scale: np.ndarray | None = None
    bits: int = 0
    high: np.ndarray | None = None
    zero_point: np.ndarray | None = None
    minimum: np.ndarray | None = None
    super_scale: np.ndarray | None = None
    super_minimum: np.ndarray | None = None


def kernel_group(in_size: int, group_size: int) -> int | None:
    """Returns the columns per scale in the kernels for codes with `group_size`; None if they have no such groups."""
    is_half = group_size == CODE_UNIT // 2 and in_size % CODE_UNIT == 0
    if is_half or (group_size % CODE_UNIT == 0 and group_size <= MAX_CODE_GROUP):
        return group_size
    # Larger groups are cut.
    sizes = range(MAX_CODE_GROUP, 0, -CODE_UNIT)
    return next((size for size in sizes if group_size % size == 0), None)


def kernel_scales(scales: np.ndarray) -> np.ndarray:
    return scales if scales.dtype.name in SCALE_TYPES else scales.astype(np.float32)


def repeat(scales: np.ndarray, repeats: int) -> np.ndarray:
    """Repeats scales, minima or zero points of groups that are each cut into `repeats` groups."""
    return scales if repeats == 1 else np.repeat(scales, repeats, axis=-1)
