"""MLX's quantized weights, as mlx-community publishes them: integers with a scale and a bias for each group, or floats.

`weight` uint32 [out, in * bits / 32] has the elements of a row without gaps, the earliest in the lowest bits. Modes:
"affine" elements are `scales * q + biases`, with both [out, groups]; those of "mxfp4" and "nvfp4" are e2m1, of "mxfp8"
e4m3, times `scales` uint8 [out, groups], which are the bits of e8m0 (mx) or e4m3 (nv).
Source: MLX's `mlx.core.quantize` and `dequantize`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from jaxis.kernels.weights import BlockScaledWeight, CodedWeight, QuantizedWeight, WeightScheme
from jaxis.kernels.weights.code_planes import LOW_BITS, code_planes
from jaxis.kernels.weights.scale_codes import find_codes
from jaxis.layers.weight_format import TensorSpec
from jaxis.quantization.formats.finite import check_finite
from jaxis.quantization.formats.word_packing import unpack_numbers

AFFINE_BITS = (2, 3, 4, 5, 6, 8)
AFFINE_DTYPES = tuple(np.dtype(dtype) for dtype in (np.float16, ml_dtypes.bfloat16, np.float32))
E2M1_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# Mode of floats -> bits of an element, elements in a group, type of the scales.
FLOAT_MODES = {
    "mxfp4": (4, 32, np.dtype(ml_dtypes.float8_e8m0fnu)),
    "mxfp8": (8, 32, np.dtype(ml_dtypes.float8_e8m0fnu)),
    "nvfp4": (4, 16, np.dtype(ml_dtypes.float8_e4m3fn)),
}


@dataclass(frozen=True)
class MlxAffineFormat:
    """`weight`, `scales` and `biases`.

    `group_size` is the elements that share a scale and a bias. `scheme` is the one by which jaxis quantized the weight,
    if it did; it decides the type of the weight in memory.
    """

    bits: int
    group_size: int
    scheme: WeightScheme | None = None

    def tensors(self, shape: tuple[int, ...]) -> Mapping[str, TensorSpec]:
        # Few scales and biases follow from each other or are codes, as `scheme` says; zeros do and are.
        sample = None if self.scheme is None else (0.0,)
        groups = TensorSpec((shape[0], _num_groups(shape, self.group_size)), AFFINE_DTYPES, sample=sample)
        return {"weight": _words(shape, self.bits), "scales": groups, "biases": groups}

    def assemble(self, tensors: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> QuantizedWeight | CodedWeight:
        if not all(np.isfinite(array.astype(np.float32)).all() for array in (tensors["scales"], tensors["biases"])):
            raise ValueError("whose scales or biases are not all finite")
        if self.scheme is not None:
            return self._as_quantized(tensors, shape, self.scheme)
        return self._as_codes(tensors, shape)

    def _as_codes(self, tensors: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> CodedWeight:
        words, scales, biases = tensors["weight"], tensors["scales"], tensors["biases"]
        if self.bits == LOW_BITS[self.bits]:
            return CodedWeight(_bytes_of(words), scales, minimum=biases, bits=self.bits)
        planes = code_planes(unpack_numbers(words, self.bits, shape[1]), self.bits)
        return CodedWeight(planes["codes"], scales, planes["high"], minimum=biases, bits=self.bits)

    def _as_quantized(
        self, tensors: Mapping[str, np.ndarray], shape: tuple[int, ...], scheme: WeightScheme
    ) -> QuantizedWeight | CodedWeight:
        """Returns the weight that jaxis' own quantization gave."""
        scales, biases = tensors["scales"], tensors["biases"]
        if scheme.weight_calibration_method != "affine":
            half = 1 << (self.bits - 1)
            if (biases.astype(np.float32) != scales.astype(np.float32) * -half).any():
                raise ValueError(
                    f"whose biases are not -{half} times its scales, as those of {scheme.weight_qtype} are"
                )
            numbers = _bytes_of(tensors["weight"])
            qvalue = (numbers ^ np.uint8(0x80)).view(np.int8) if self.bits == 8 else numbers
            return QuantizedWeight(qvalue, scales, act_qtype=scheme.act_qtype)
        scale, minimum = find_codes(scales), find_codes(biases, are_minima=True)
        if scale is None or minimum is None:
            raise ValueError("whose scales or biases are not 8-bit codes times a power of two")
        return dataclasses.replace(
            self._as_codes(tensors, shape),
            scale=scale[0],
            super_scale=scale[1],
            minimum=minimum[0],
            super_minimum=minimum[1],
            act_qtype=scheme.act_qtype,
        )


@dataclass(frozen=True)
class MlxFloatFormat:
    """`weight` and `scales`; the mode is a key of FLOAT_MODES."""

    mode: str

    def tensors(self, shape: tuple[int, ...]) -> Mapping[str, TensorSpec]:
        bits, group_size, _ = FLOAT_MODES[self.mode]
        groups = (shape[0], _num_groups(shape, group_size))
        return {"weight": _words(shape, bits), "scales": TensorSpec(groups, (np.dtype(np.uint8),))}

    def assemble(self, tensors: Mapping[str, np.ndarray], _shape: tuple[int, ...]) -> BlockScaledWeight | CodedWeight:
        bits, group_size, scale_dtype = FLOAT_MODES[self.mode]
        elements, scale = _bytes_of(tensors["weight"]), tensors["scales"].view(scale_dtype)
        if self.mode == "nvfp4":
            if not np.isfinite(scale.astype(np.float32)).all():
                raise ValueError("whose scales are not all finite")
            return CodedWeight(elements, scale, levels=E2M1_LEVELS)
        value = elements if bits == 4 else elements.view(ml_dtypes.float8_e4m3fn)
        weight = BlockScaledWeight(value, scale, (1, group_size))
        check_finite(weight)
        return weight


def _num_groups(shape: tuple[int, ...], group_size: int) -> int:
    if shape[1] % group_size:
        raise ValueError(f"has {shape[1]} features, which groups of {group_size} do not divide")
    return shape[1] // group_size


def _words(shape: tuple[int, ...], bits: int) -> TensorSpec:
    return TensorSpec((shape[0], shape[1] * bits // 32), (np.dtype(np.uint32),))


def _bytes_of(words: np.ndarray) -> np.ndarray:
    """uint32 [out, n] -> uint8 [out, 4 n], the lowest byte of a word first."""
    return np.ascontiguousarray(words.astype("<u4", copy=False)).view(np.uint8)
