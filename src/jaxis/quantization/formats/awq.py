"""AWQ's packed 4-bit integers, as AutoAWQ writes them for its "gemm" and "gemv" kernels.

"gemm": `qweight` int32 [in, out / 8], `qzeros` int32 [groups, out / 8], `scales` [groups, out]; the numbers in a
word, from the lowest bits, are those of outputs 0, 2, 4, 6, 1, 3, 5 and 7. "gemv": `qweight` int32 [out, in / 8] in
order, `qzeros` int32 [out, groups / 8] and `scales` [out, groups], with groups filled up to whole words and more.
Source: AutoAWQ's WQLinear_GEMM and WQLinear_GEMV.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jaxis.kernels.weights import CodedWeight, QuantizedWeight
from jaxis.layers.weight_format import TensorSpec
from jaxis.quantization.formats.integer_groups import (
    SCALE_DTYPES,
    check_columns,
    group_sizes,
    in_equal_groups,
    planes_of,
    weight_of,
)
from jaxis.quantization.formats.word_packing import num_words, unpack_numbers

_BITS = 4
_NUMBERS_PER_WORD = 8
_OUTPUTS_IN_WORD = (0, 2, 4, 6, 1, 3, 5, 7)
_INT32 = (np.dtype(np.int32),)


@dataclass(frozen=True)
class AwqGemmFormat:
    """`qweight` and `qzeros`, packed along the outputs, and `scales`; without `qzeros`, every zero point is 8.

    `group_size` is the features that share a scale; None means all of them.
    """

    group_size: int | None
    has_zeros: bool = True

    def tensors(self, shape: tuple[int, ...]) -> Mapping[str, TensorSpec]:
        rows, columns = shape
        check_columns(columns)
        groups, words = len(group_sizes(columns, self.group_size)), -(-rows // _NUMBERS_PER_WORD)
        specs = {
            "qweight": TensorSpec((columns, words), _INT32),
            "scales": TensorSpec((groups, rows), SCALE_DTYPES),
        }
        return specs | {"qzeros": TensorSpec((groups, words), _INT32)} if self.has_zeros else specs

    def assemble(self, tensors: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> QuantizedWeight | CodedWeight:
        rows, columns = shape
        words = np.asarray(tensors["qweight"]).view(np.uint32)
        pairs = _of_outputs([_number(words[::2], i) | _number(words[1::2], i) << 4 for i in range(_NUMBERS_PER_WORD)])
        zero_point = None
        if self.has_zeros:
            zeros = np.asarray(tensors["qzeros"]).view(np.uint32)
            zero_point = _of_outputs([_number(zeros, i) for i in range(_NUMBERS_PER_WORD)])[:rows]
        scale = np.ascontiguousarray(tensors["scales"].T)
        scale, zero_point = in_equal_groups(group_sizes(columns, self.group_size), scale, zero_point)
        return weight_of({"codes": pairs[:rows]}, _BITS, scale, zero_point)


@dataclass(frozen=True)
class AwqGemvFormat:
    """`qweight` and `qzeros`, packed along the features and groups, and `scales`.

    `group_size` is the features that share a scale; None means all of them. `num_zero_words` is the words of `qzeros`
    for each output; there are eight times as many scales.
    """

    group_size: int | None
    num_zero_words: int

    def tensors(self, shape: tuple[int, ...]) -> Mapping[str, TensorSpec]:
        rows, columns = shape
        check_columns(columns)
        groups = len(group_sizes(columns, self.group_size))
        if num_words(groups, _BITS) > self.num_zero_words:
            raise ValueError(f"has {self.num_zero_words} words of zero points for a row of {groups} groups")
        return {
            "qweight": TensorSpec((rows, num_words(columns, _BITS)), _INT32),
            "qzeros": TensorSpec((rows, self.num_zero_words), _INT32),
            "scales": TensorSpec((rows, _NUMBERS_PER_WORD * self.num_zero_words), SCALE_DTYPES),
        }

    def assemble(self, tensors: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> QuantizedWeight | CodedWeight:
        columns = shape[1]
        sizes = group_sizes(columns, self.group_size)
        scale = np.ascontiguousarray(tensors["scales"][:, : len(sizes)])
        zero_point = unpack_numbers(tensors["qzeros"], _BITS, len(sizes))
        scale, zero_point = in_equal_groups(sizes, scale, zero_point)
        return weight_of(planes_of(tensors["qweight"], _BITS, columns), _BITS, scale, zero_point)


def _number(words: np.ndarray, place: int) -> np.ndarray:
    return (words >> np.uint32(_BITS * place)).astype(np.uint8) & np.uint8(0xF)


def _of_outputs(parts: list[np.ndarray]) -> np.ndarray:
    """Orders the numbers at each place of words by output: uint8 [n, out / 8] -> uint8 [out, n]."""
    n, words = parts[0].shape
    outputs = np.empty((words, _NUMBERS_PER_WORD, n), np.uint8)
    for output, part in zip(_OUTPUTS_IN_WORD, parts, strict=True):
        outputs[:, output] = part.T
    return outputs.reshape(-1, n)
