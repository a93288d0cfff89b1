"""Integers of 1 to 8 bits with a scale for each row or group: compressed-tensors' `int-quantized` and `pack-quantized`.

Source: compressed-tensors' NaiveQuantizationCompressor and PackedQuantizationCompressor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from jaxis.kernels.weights import CodedWeight, QuantizedWeight, ReorderedWeight, WeightScheme
from jaxis.kernels.weights.code_planes import code_planes
from jaxis.layers.weight_format import TensorSpec
from jaxis.quantization.formats.word_packing import nibble_pairs, num_words, unpack_numbers

SCALE_DTYPES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
_WORD_BITS = 32


@dataclass(frozen=True)
class Integers:
    """The integers that a weight consists of, as `scale * (integer - zero point)`.

    Attributes:
      bits: 1 to 8. The integers are signed, from -2 ** (bits - 1).
      group_size: Columns that share a scale; None means all of them.
      has_one_scale: True if the whole weight has one scale.
      has_zero_points: True if each scale has a zero point, of the same type as the integers.
      act_qtype: "int8" quantizes the input of products dynamically; None does not.
    """

    bits: int
    group_size: int | None = None
    has_one_scale: bool = False
    has_zero_points: bool = False
    act_qtype: str | None = None

    @classmethod
    def of(cls, scheme: WeightScheme) -> Integers:
        """Returns the integers of a weight that jaxis quantizes by this scheme."""
        return cls(
            int(scheme.weight_qtype.removeprefix("int")),
            scheme.group_size,
            has_zero_points=scheme.weight_calibration_method == "minmax",
            act_qtype=scheme.act_qtype,
        )

    @property
    def scheme(self) -> WeightScheme | None:
        """Returns the scheme by which jaxis quantizes weights in this format; None if there is none."""
        if self.has_one_scale or (self.bits, self.has_zero_points) not in ((8, False), (4, False), (4, True)):
            return None
        method = "minmax" if self.has_zero_points else "absmax"
        return WeightScheme(f"int{self.bits}", self.group_size, method, self.act_qtype)

    def groups_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Returns the shape [out, groups] of the scales of a weight [out, in]; [1, 1] of the only scale.

        Raises ValueError if groups do not divide the weight's columns evenly, or bytes do not.
        """
        rows, columns = shape
        if columns % (self.group_size or 1):
            raise ValueError(f"has {columns} input features, which groups of {self.group_size} do not divide")
        if self.bits == 4 and columns % 2:
            raise ValueError(f"has {columns} input features, which pairs of int4 do not divide")
        return (1, 1) if self.has_one_scale else (rows, columns // (self.group_size or columns))

    def scales(self, shape: tuple[int, ...], dtypes: tuple[np.dtype, ...] = SCALE_DTYPES) -> TensorSpec:
        """Returns the spec of the scales, or of unpacked zero points."""
        rows, groups = self.groups_shape(shape)
        if self.has_one_scale:
            return TensorSpec((1,), dtypes, other_shapes=((), (1, 1)))
        return TensorSpec((rows, groups), dtypes, other_shapes=((rows,),) if groups == 1 else ())

    def weight(
        self, numbers: np.ndarray, scale: np.ndarray, zero_point: np.ndarray | None, shape: tuple[int, ...]
    ) -> QuantizedWeight | CodedWeight:
        """Returns the weight of integers plus 2 ** (bits - 1): uint8 [out, in], or two of 4 bits a byte, [out, in / 2].

        Scales are as `scales` specifies them; zero points uint8 of their shape, with the same number added.
        """
        if self.bits >= 7 and zero_point is None:
            return self.signed_weight((numbers - np.uint8(1 << (self.bits - 1))).view(np.int8), scale, shape)
        scale, zero_point = self._by_row(scale, shape), None if zero_point is None else self._by_row(zero_point, shape)
        if self.bits == 4:
            return QuantizedWeight(numbers, self._readable(scale), zero_point, self.act_qtype)
        # Planes of bits need whole bytes; there are none of 1 and 7 bits.
        bits = {1: 2, 7: 8}.get(self.bits, self.bits) if shape[1] % 8 == 0 else 8
        offset = 0 if zero_point is not None else 1 << (self.bits - 1)
        planes = code_planes(numbers, bits)
        return CodedWeight(
            planes["codes"],
            scale,
            planes.get("high"),
            zero_point,
            bits=bits,
            offset=offset,
            act_qtype=self.act_qtype,
        )

    def signed_weight(self, integers: np.ndarray, scale: np.ndarray, shape: tuple[int, ...]) -> QuantizedWeight:
        """Returns the weight of int8 [out, in] and its scale, without zero points; the integers are not copied."""
        return QuantizedWeight(integers, self._readable(self._by_row(scale, shape)), act_qtype=self.act_qtype)

    def _by_row(self, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """[..., groups] -> [out, groups]."""
        return np.broadcast_to(array.reshape(-1, self.groups_shape(shape)[1]), (shape[0], self.groups_shape(shape)[1]))

    def _readable(self, scale: np.ndarray) -> np.ndarray:
        return scale.astype(np.float32) if scale.shape[1] == 1 or scale.dtype == np.float16 else scale


@dataclass(frozen=True)
class IntQuantizedFormat:
    """`weight` int8 [out, in], `weight_scale` [out, groups] and, if asymmetric, `weight_zero_point` int8 [out, groups].

    The integers have 8 bits, though the weight may not use all of them.
    """

    integers: Integers

    def tensors(self, shape: tuple[int, ...]) -> Mapping[str, TensorSpec]:
        int8 = (np.dtype(np.int8),)
        specs = {"weight": TensorSpec(shape, int8), "weight_scale": self.integers.scales(shape)}
        zero_points = self.integers.scales(shape, int8)
        # Older versions write zeros for symmetric weights.
        specs["weight_zero_point"] = dataclasses.replace(zero_points, is_zero=not self.integers.has_zero_points)
        return specs

    def assemble(self, tensors: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> QuantizedWeight | CodedWeight:
        integers, scale = self.integers, tensors["weight_scale"]
        if integers.bits == 8 and not integers.has_zero_points:
            return integers.signed_weight(tensors["weight"], scale, shape)
        zero_point = _unsigned(tensors["weight_zero_point"]) if integers.has_zero_points else None
        return integers.weight(_unsigned(tensors["weight"]), scale, zero_point, shape)


@dataclass(frozen=True)
class PackQuantizedFormat:
    """`weight_packed` int32 [out, words], `weight_scale` [out, groups] and `weight_shape` [2].

    If asymmetric, there is `weight_zero_point` int32 [words, groups]; with `has_order`, `weight_g_idx` int32 [in], the
    group of each column; -1 means that they are in order. Numbers are packed densely; by older writers, as many in each
    word as fit in whole, which the number of words shows.
    """

    integers: Integers
    has_order: bool = False

    def tensors(self, shape: tuple[int, ...]) -> Mapping[str, TensorSpec]:
        rows, columns = shape
        bits, words, int32 = self.integers.bits, num_words, (np.dtype(np.int32),)
        specs = {
            "weight_packed": TensorSpec(
                (rows, words(columns, bits)), int32, other_shapes=((rows, _num_padded_words(columns, bits)),)
            ),
            "weight_shape": TensorSpec((2,), (np.dtype(np.int64), np.dtype(np.int32)), content=tuple(shape)),
            "weight_scale": self.integers.scales(shape),
        }
        if self.integers.has_zero_points and self.integers.has_one_scale:
            specs["weight_zero_point"] = self.integers.scales(shape, (np.dtype(np.int8),))
        elif self.integers.has_zero_points:
            groups = self.integers.groups_shape(shape)[1]
            specs["weight_zero_point"] = TensorSpec(
                (words(rows, bits), groups), int32, other_shapes=((_num_padded_words(rows, bits), groups),)
            )
        if self.has_order:
            specs["weight_g_idx"] = TensorSpec((columns,), int32, sample=(-1.0,))
        return specs

    def assemble(
        self, tensors: Mapping[str, np.ndarray], shape: tuple[int, ...]
    ) -> QuantizedWeight | CodedWeight | ReorderedWeight:
        bits, packed = self.integers.bits, tensors["weight_packed"]
        is_padded = packed.shape[1] != num_words(shape[1], bits)
        if self.has_order:
            order = self._order(tensors["weight_g_idx"], shape)
            numbers = _unpack(packed, bits, shape[1], is_padded)[:, order]
            numbers = code_planes(numbers, bits)["codes"] if bits == 4 else numbers
            zero_point = self._zero_point(tensors, shape, is_padded)
            weight = self.integers.weight(numbers, tensors["weight_scale"], zero_point, shape)
            # Even where columns are in order, so that all experts of a layer have the same type.
            return ReorderedWeight(weight, order[None].astype(np.int32))
        numbers = nibble_pairs(packed, shape[1]) if bits == 4 else _unpack(packed, bits, shape[1], is_padded)
        return self.integers.weight(
            numbers, tensors["weight_scale"], self._zero_point(tensors, shape, is_padded), shape
        )

    def _order(self, group_of_column: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        if (group_of_column == -1).any():
            return np.arange(shape[1])
        groups = self.integers.groups_shape(shape)[1]
        if group_of_column.min() < 0 or group_of_column.max() >= groups:
            raise ValueError(f"whose weight_g_idx has groups that are not among its {groups}")
        sizes = np.bincount(group_of_column, minlength=groups)
        if (sizes != sizes[0]).any():
            raise ValueError(f"whose groups have from {sizes.min()} to {sizes.max()} columns, which is not supported")
        return np.argsort(group_of_column, kind="stable")

    def _zero_point(
        self, tensors: Mapping[str, np.ndarray], shape: tuple[int, ...], is_padded: bool
    ) -> np.ndarray | None:
        if not self.integers.has_zero_points:
            return None
        stored, bits = tensors["weight_zero_point"], self.integers.bits
        if self.integers.has_one_scale:
            return stored.view(np.uint8) + np.uint8(1 << (bits - 1))
        expected = _num_padded_words(shape[0], bits) if is_padded else num_words(shape[0], bits)
        if len(stored) != expected:
            raise ValueError(f"whose zero points are packed in {len(stored)} words, its elements as if in {expected}")
        return _unpack(stored.T, bits, shape[0], is_padded).T


def _unsigned(integers: np.ndarray) -> np.ndarray:
    """int8 -> uint8, 128 added."""
    return integers.view(np.uint8) ^ np.uint8(0x80)


def _num_padded_words(count: int, bits: int) -> int:
    """Returns the words that hold `count` numbers if none crosses a word's border."""
    return -(-count // (_WORD_BITS // bits))


def _unpack(words: np.ndarray, bits: int, count: int, is_padded: bool) -> np.ndarray:
    """int32 [n, words] -> uint8 [n, count]."""
    if not is_padded:
        return unpack_numbers(words, bits, count)
    shifts = bits * np.arange(_WORD_BITS // bits, dtype=np.uint32)
    mask = np.uint32((1 << bits) - 1)
    numbers = ((np.ascontiguousarray(words).view(np.uint32)[..., None] >> shifts) & mask).astype(np.uint8)
    return numbers.reshape(len(words), -1)[:, :count]
