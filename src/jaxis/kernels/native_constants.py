"""Constants for types and sizes that the native library and its callers share.

`native/src/constants.cc` has the same table. `native.load` compares the two, so that a library built from other sources
fails to load instead of giving wrong results.
"""

from __future__ import annotations

WEIGHT_TYPES = {"float32": 0, "bfloat16": 1, "int8": 2, "codes": 3, "float8_e4m3fn": 4, "float4_e2m1fn": 5}
SCALE_TYPES = {"none": 0, "float32": 1, "bfloat16": 2, "float16": 3, "uint8": 4, "int8": 5, "float8_e4m3fn": 6}
ACTIVATIONS = {
    "none": 0,
    "silu": 1,
    "gelu_tanh": 2,
    "clamped_swiglu": 3,
    "relu2": 4,
    "capped_swiglu": 5,
    "limited_swiglu": 6,
    "situ": 7,
}
GATES = {"sigmoid": 0, "silu": 1, "softplus": 2, "normal_cdf": 3}
FLOAT_TYPES = {"float32": 0, "bfloat16": 1, "float16": 2}
CALIBRATIONS = {
    "int8_absmax": 0,
    "int4_absmax": 1,
    "int4_minmax": 2,
    "int4_mse": 3,
    "int4_affine": 4,
    "int5_affine": 5,
    "int6_affine": 6,
}
QUANTIZE_STATUS = {"ok": 0, "not_finite": 1, "unsupported": 2, "out_of_memory": 3}

PANEL_ROWS = 32
"""Rows of a weight that are packed together."""
MAX_MATRICES = 4
"""The most weights that one product takes."""
ACTIVATION_GROUP = 32
"""Features of an activation that are quantized together."""
CODE_UNIT = 32
"""Columns of a weight of codes that are packed together; groups are multiples of it, or half of it."""
MAX_CODE_GROUP = 128
"""The most columns of codes that share a scale."""
MAX_LEVELS = 16
"""The most levels that codes have."""
ATTENTION_TILE = 16
"""Divisor of the attention kernels' block sizes and head dimensions."""
MAX_HEAD_DIM = 512
"""The largest head dimension of the kernels of paged attention and of attention without a cache."""
MAX_CONV_WIDTH = 8
"""The most taps of the causal convolution kernel."""
VOCAB_TILE = 128
"""Tokens of a tile in reductions over the vocabulary."""


def table() -> dict[str, int]:
    enums = {
        "weight_type": WEIGHT_TYPES,
        "scale_type": SCALE_TYPES,
        "activation": ACTIVATIONS,
        "gate": GATES,
        "float_type": FLOAT_TYPES,
        "calibration": CALIBRATIONS,
        "quantize_status": QUANTIZE_STATUS,
    }
    sizes = {
        "panel_rows": PANEL_ROWS,
        "max_matrices": MAX_MATRICES,
        "activation_group": ACTIVATION_GROUP,
        "code_unit": CODE_UNIT,
        "max_code_group": MAX_CODE_GROUP,
        "max_levels": MAX_LEVELS,
        "attention_tile": ATTENTION_TILE,
        "max_head_dim": MAX_HEAD_DIM,
        "max_conv_width": MAX_CONV_WIDTH,
        "vocab_tile": VOCAB_TILE,
    }
    return {f"{enum}.{name}": number for enum, names in enums.items() for name, number in names.items()} | sizes
