"""Products of activations with low-precision weights, which stay low-precision in memory."""

from jaxis.kernels.quantized_matmul.block_scaled import BlockScaledWeight, block_scaled_matmul
from jaxis.kernels.quantized_matmul.coded import CodedWeight, coded_matmul
from jaxis.kernels.quantized_matmul.quantize import quantize
from jaxis.kernels.quantized_matmul.weight import QuantizedWeight, WeightScheme
from jaxis.kernels.quantized_matmul.xla import quantized_matmul

__all__ = [
    "BlockScaledWeight",
    "CodedWeight",
    "QuantizedWeight",
    "WeightScheme",
    "block_scaled_matmul",
    "coded_matmul",
    "quantize",
    "quantized_matmul",
]
