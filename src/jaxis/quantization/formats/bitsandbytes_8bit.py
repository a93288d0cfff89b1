"""bitsandbytes in 8 bits (LLM.int8()): int8 rows and the largest magnitude of each.

`weight` int8 [out, in] comes with `SCB` float32 [out]: a row's elements are `q * SCB / 127`. `weight_format` tells
the order of the elements; only 0, by rows, is in use. Outliers exist only in activations, which are not quantized here.
Source: bitsandbytes' `Int8Params` and `int8_vectorwise_dequant`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jaxis.kernels.weights import QuantizedWeight
from jaxis.layers.weight_format import TensorSpec

_ORDERS = ("row", "col32", "col_turing", "col_ampere")


@dataclass(frozen=True)
class Bitsandbytes8BitFormat:
    """`weight`, `SCB` and, in most files, `weight_format`."""

    has_weight_format: bool = True

    def tensors(self, shape: tuple[int, ...]) -> Mapping[str, TensorSpec]:
        specs = {
            "weight": TensorSpec(shape, (np.dtype(np.int8),)),
            "SCB": TensorSpec((shape[0],), (np.dtype(np.float32),)),
        }
        if self.has_weight_format:
            specs["weight_format"] = TensorSpec((), (np.dtype(np.uint8), np.dtype(np.int8)), other_shapes=((1,),))
        return specs

    def assemble(self, tensors: Mapping[str, np.ndarray], _shape: tuple[int, ...]) -> QuantizedWeight:
        order = int(tensors["weight_format"].reshape(())) if self.has_weight_format else 0
        if order:
            name = _ORDERS[order] if 0 < order < len(_ORDERS) else order
            raise ValueError(f"in the order {name} of a GPU's kernels: save the model again with bitsandbytes >= 0.45")
        largest = tensors["SCB"]
        if not np.isfinite(largest).all():
            raise ValueError("whose scales are not all finite")
        return QuantizedWeight(tensors["weight"], (largest * np.float32(1 / 127))[:, None])
