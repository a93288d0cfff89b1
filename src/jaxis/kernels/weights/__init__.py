"""Weights as values: what a matrix [out, in] is in memory, and the functions on it.

A weight is an array, or a pytree that represents one: QuantizedWeight (low-bit integers), BlockScaledWeight
(low-bit floats), CodedWeight (low-bit codes of other meanings), PackedWeight (any of these, laid out for the native CPU
kernels), ReorderedWeight (one of these whose columns are in an order of their own). A stack of experts is the same type
with a leading axis. How a value is multiplied, looked up or packed is decided by its type alone: `table.py` has the
functions that do it for each type, and a new type of weight is one more entry there.
"""

from jaxis.kernels.quantized_matmul.block_scaled import BlockScaledWeight
from jaxis.kernels.quantized_matmul.coded import CodedWeight
from jaxis.kernels.quantized_matmul.packed import Allocate, PackedWeight
from jaxis.kernels.quantized_matmul.quantize import check_quantizable, quantize
from jaxis.kernels.quantized_matmul.reordered import ReorderedWeight
from jaxis.kernels.quantized_matmul.weight import QuantizedWeight, WeightScheme
from jaxis.kernels.weights.functions import dequantize, experts, fused_matmul, gated_matmul, lookup, matmul, pack
from jaxis.kernels.weights.operations import ExpertStacks, GatedUnit, Operations, Weight, register
from jaxis.kernels.weights.rows import take_rows
from jaxis.kernels.weights.table import TABLE

__all__ = [
    "TABLE",
    "Allocate",
    "BlockScaledWeight",
    "CodedWeight",
    "ExpertStacks",
    "GatedUnit",
    "Operations",
    "PackedWeight",
    "QuantizedWeight",
    "ReorderedWeight",
    "Weight",
    "WeightScheme",
    "check_quantizable",
    "dequantize",
    "experts",
    "fused_matmul",
    "gated_matmul",
    "lookup",
    "matmul",
    "pack",
    "quantize",
    "register",
    "take_rows",
]
