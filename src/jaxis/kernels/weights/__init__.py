"""Weights as values: forms of a matrix [out, in] in memory, and the functions on them.

A weight is a float array, or a pytree that inherits from `Weight` and its methods: QuantizedWeight (low-bit integers),
BlockScaledWeight (low-bit floats), CodedWeight (low-bit codes of other meanings), PackedWeight (any of these, packed
for the native CPU kernels), ReorderedWeight (one of these with columns in an order of their own), TokenQuantizedWeight
(codes whose products' input is quantized token by token). A stack of experts is the same form with a leading axis. A
new form is one more such class.
"""

from jaxis.kernels.weights.block_scaled_weight import BlockScaledWeight
from jaxis.kernels.weights.coded_weight import CodedWeight
from jaxis.kernels.weights.expert_additions import ExpertAdditions
from jaxis.kernels.weights.float_weight import as_value, as_weight
from jaxis.kernels.weights.functions import (
    dequantize,
    experts,
    fused_matmul,
    gated_matmul,
    head_matmul,
    lookup,
    matmul,
    pack,
    take_rows,
)
from jaxis.kernels.weights.grouped_experts import ROWS_AXIS
from jaxis.kernels.weights.packed_weight import PackedWeight, can_pack_experts
from jaxis.kernels.weights.quantize import quantize
from jaxis.kernels.weights.quantized_weight import QuantizedWeight
from jaxis.kernels.weights.reordered_weight import ReorderedWeight
from jaxis.kernels.weights.scheme import WeightScheme, check_quantizable
from jaxis.kernels.weights.token_quantized_weight import TokenQuantizedWeight
from jaxis.kernels.weights.weight import Allocate, ExpertStacks, GatedUnit, Weight, WeightValue

__all__ = [
    "ROWS_AXIS",
    "Allocate",
    "BlockScaledWeight",
    "CodedWeight",
    "ExpertAdditions",
    "ExpertStacks",
    "GatedUnit",
    "PackedWeight",
    "QuantizedWeight",
    "ReorderedWeight",
    "TokenQuantizedWeight",
    "Weight",
    "WeightScheme",
    "WeightValue",
    "as_value",
    "as_weight",
    "can_pack_experts",
    "check_quantizable",
    "dequantize",
    "experts",
    "fused_matmul",
    "gated_matmul",
    "head_matmul",
    "lookup",
    "matmul",
    "pack",
    "quantize",
    "take_rows",
]
