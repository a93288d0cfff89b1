"""Integers with a scale for each row or group: compressed-tensors' `int-quantized` and `pack-quantized`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from jaxis.kernels.weights import QuantizedWeight, WeightScheme, check_quantizable
from jaxis.layers.weight_format import TensorSpec
from jaxis.quantization.formats.int4_words import VALUES_PER_WORD, unpack_rows, unpack_words

SCALE_DTYPES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


@dataclass(frozen=True)
class IntQuantizedFormat:
    """`weight` int8 [out, in] and `weight_scale` [out, groups].

    Attributes:
      scheme: How the weight was quantized, and how the input of its products is.
    """

    scheme: WeightScheme

    def tensors(self, shape: tuple[int, ...]) -> Mapping[str, TensorSpec]:
        return {"weight": TensorSpec(shape, (np.dtype(np.int8),)), "weight_scale": _scales(shape, self.scheme)}

    def assemble(self, tensors: Mapping[str, np.ndarray], _shape: tuple[int, ...]) -> QuantizedWeight:
        scale = _readable_scale(tensors["weight_scale"], self.scheme)
        return QuantizedWeight(tensors["weight"], scale, act_qtype=self.scheme.act_qtype)


@dataclass(frozen=True)
class PackQuantizedFormat:
    """`weight_packed` int32 [out, in / 8], `weight_scale` [out, groups] and `weight_shape` [2]; if asymmetric,
    `weight_zero_point` int32 [out / 8, groups].

    Attributes:
      scheme: See IntQuantizedFormat.
    """

    scheme: WeightScheme

    def tensors(self, shape: tuple[int, ...]) -> Mapping[str, TensorSpec]:
        rows, columns = shape
        words, scale = (np.dtype(np.int32),), _scales(shape, self.scheme)
        specs = {
            "weight_packed": TensorSpec((rows, -(-columns // VALUES_PER_WORD)), words),
            "weight_shape": TensorSpec((2,), (np.dtype(np.int64), np.dtype(np.int32)), content=tuple(shape)),
            "weight_scale": scale,
        }
        if self._has_zero_points:
            specs["weight_zero_point"] = TensorSpec((-(-rows // VALUES_PER_WORD), scale.shape[1]), words)
        return specs

    def assemble(self, tensors: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> QuantizedWeight:
        return QuantizedWeight(
            unpack_words(tensors["weight_packed"], shape[1]),
            _readable_scale(tensors["weight_scale"], self.scheme),
            unpack_rows(tensors["weight_zero_point"], shape[0]) if self._has_zero_points else None,
            self.scheme.act_qtype,
        )

    @property
    def _has_zero_points(self) -> bool:
        return self.scheme.weight_calibration_method == "minmax"


def _scales(shape: tuple[int, ...], scheme: WeightScheme) -> TensorSpec:
    """The spec of the scales. Raises ValueError if groups do not divide the weight's columns evenly."""
    check_quantizable(shape[1], scheme)
    return TensorSpec((shape[0], 1 if scheme.group_size is None else shape[1] // scheme.group_size), SCALE_DTYPES)


def _readable_scale(scale: np.ndarray, scheme: WeightScheme) -> np.ndarray:
    """The scale in a type that a QuantizedWeight supports."""
    return scale.astype(np.float32) if scheme.group_size is None or scale.dtype == np.float16 else scale
