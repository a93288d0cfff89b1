"""GPTQ's packed integers, as AutoGPTQ, GPTQModel and AutoRound write them.

`qweight` int32 [in * bits / 32, out] is packed along its columns' features, `qzeros` int32 [groups, out * bits / 32]
along the outputs, both densely from the lowest bits; `scales` [groups, out]. `g_idx` int32 [in] is the group of each
feature: it is not in order if the columns were quantized in the order of their importance ("act-order").
Source: AutoGPTQ's and GPTQModel's QuantLinear.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jaxis.kernels.weights import CodedWeight, QuantizedWeight, ReorderedWeight
from jaxis.layers.weight_format import TensorSpec
from jaxis.quantization.formats.integer_groups import (
    SCALE_DTYPES,
    check_columns,
    group_sizes,
    in_equal_groups,
    planes_of,
    weight_of,
)
from jaxis.quantization.formats.word_packing import num_words, pack_numbers, unpack_numbers

_INT32 = (np.dtype(np.int32),)


@dataclass(frozen=True)
class GptqFormat:
    """`qweight`, `scales`, and as far as the file has them `qzeros`, `g_idx` and `bias`.

    Attributes:
      bits: Bits of an element: 2, 3, 4 or 8.
      group_size: Features that share a scale; None means all of them.
      is_symmetric: True if every zero point is 2 ** (bits - 1), however `qzeros` writes that; None if config.json does
        not say.
      zeros_less_one: True if `qzeros` has the zero points minus 1, modulo 2 ** bits: version 1 of the format.
      has_order: True if there is `g_idx`.
      reorders: True makes the weight a ReorderedWeight even if `g_idx` is in order, so that all experts of a layer have
        the same type.
      has_bias: True if there is a `bias`: older tools write zeros for layers without one.
    """

    bits: int
    group_size: int | None
    is_symmetric: bool | None = True
    zeros_less_one: bool = True
    has_zeros: bool = True
    has_order: bool = False
    reorders: bool = False
    has_bias: bool = False

    def tensors(self, shape: tuple[int, ...]) -> Mapping[str, TensorSpec]:
        rows, columns = shape
        check_columns(columns)
        groups = len(group_sizes(columns, self.group_size))
        specs = {
            "qweight": TensorSpec((num_words(columns, self.bits), rows), _INT32),
            "scales": TensorSpec((groups, rows), SCALE_DTYPES),
        }
        if self.has_zeros:
            specs["qzeros"] = TensorSpec((groups, num_words(rows, self.bits)), _INT32, sample=_middle_zeros(self.bits))
        if self.has_order:
            specs["g_idx"] = TensorSpec((columns,), _INT32, sample=_groups_in_order(columns, self.group_size))
        if self.has_bias:
            specs["bias"] = TensorSpec((rows,), is_zero=True)
        return specs

    def assemble(
        self, tensors: Mapping[str, np.ndarray], shape: tuple[int, ...]
    ) -> QuantizedWeight | CodedWeight | ReorderedWeight:
        rows, columns = shape
        sizes, order = group_sizes(columns, self.group_size), None
        if self.has_order:
            sizes, order = _sizes_and_order(tensors["g_idx"], len(sizes), sizes)
        scale = np.ascontiguousarray(tensors["scales"].T)
        zero_point = self._zero_points(tensors["qzeros"], rows) if self.has_zeros else None
        scale, zero_point = in_equal_groups(sizes, scale, zero_point)
        words = np.ascontiguousarray(tensors["qweight"].T)
        weight = weight_of(planes_of(words, self.bits, columns, order), self.bits, scale, zero_point)
        if order is None and self.reorders:
            order = np.arange(columns)
        return weight if order is None else ReorderedWeight(weight, order[None].astype(np.int32))

    def _zero_points(self, words: np.ndarray, rows: int) -> np.ndarray | None:
        """qzeros -> uint8 [out, groups]; None if all are in the middle and the weight is known to be symmetric."""
        stored = np.ascontiguousarray(unpack_numbers(words, self.bits, rows).T)
        middle = 1 << (self.bits - 1)
        is_middle = any(np.all(stored == value) for value in (middle, middle - 1))
        if self.is_symmetric:
            if not is_middle:
                raise ValueError(f"whose zero points are not all {middle}, although `sym` in config.json is true")
            return None
        if self.is_symmetric is None and is_middle:
            return np.full_like(stored, middle)
        return (stored + np.uint8(self.zeros_less_one)) & np.uint8((1 << self.bits) - 1)


@functools.cache
def _middle_zeros(bits: int) -> tuple[int, ...]:
    return tuple(pack_numbers(np.full(32, 1 << (bits - 1), np.uint8), bits).tolist())


@functools.cache
def _groups_in_order(columns: int, group_size: int | None) -> tuple[int, ...]:
    return tuple(index // (group_size or columns) for index in range(columns))


def _sizes_and_order(groups: np.ndarray, num_groups: int, sizes: list[int]) -> tuple[list[int], np.ndarray | None]:
    """Returns the features in each group, and the features sorted by group; None if they are in order.

    `groups` int32 [in] has the group of each feature; `sizes` are the result if they are in order. Raises ValueError if
    there is no such group.
    """
    if np.array_equal(groups, np.repeat(np.arange(num_groups), sizes)):
        return sizes, None
    if groups.min() < 0 or groups.max() >= num_groups:
        raise ValueError(f"whose g_idx has groups from {groups.min()} to {groups.max()}, but there are {num_groups}")
    return np.bincount(groups, minlength=num_groups).tolist(), np.argsort(groups, kind="stable")
