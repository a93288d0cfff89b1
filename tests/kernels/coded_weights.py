"""Weights of random codes, of each kind that formats need, and what they stand for in float64."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from jaxis.kernels.weights import CodedWeight

IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1_LEVELS = (0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6)

# Name -> bits of a code, group, and how scales and what is subtracted are stored.
KINDS = {
    "q5_0": {"bits": 5, "group": 32, "offset": 16, "scale": np.float16},
    "q4_1": {"bits": 4, "group": 32, "scale": np.float16, "minimum": np.float16},
    "q5_1": {"bits": 5, "group": 32, "scale": np.float16, "minimum": np.float16},
    "q2_k": {"bits": 2, "group": 16, "scale": np.uint8, "minimum": np.uint8, "super": 256},
    "q3_k": {"bits": 3, "group": 16, "offset": 4, "scale": np.int8, "super": 256},
    "q4_k": {"bits": 4, "group": 32, "scale": np.uint8, "minimum": np.uint8, "super": 256},
    "q5_k": {"bits": 5, "group": 32, "scale": np.uint8, "minimum": np.uint8, "super": 256},
    "q6_k": {"bits": 6, "group": 16, "offset": 32, "scale": np.int8, "super": 256},
    "iq4_nl": {"bits": 4, "group": 32, "scale": np.float16, "levels": IQ4_LEVELS},
    "iq4_xs": {"bits": 4, "group": 32, "scale": np.int8, "super": 256, "levels": IQ4_LEVELS},
    "nvfp4": {"bits": 4, "group": 16, "scale": ml_dtypes.float8_e4m3fn, "super": None, "levels": E2M1_LEVELS},
    "nf4": {"bits": 4, "group": 64, "scale": np.float32, "levels": tuple(np.linspace(-1, 1, 16).tolist())},
    "mlx4": {"bits": 4, "group": 64, "scale": ml_dtypes.bfloat16, "minimum": ml_dtypes.bfloat16},
    "mlx8": {"bits": 8, "group": 128, "scale": np.float32, "minimum": np.float32},
    "gptq3": {"bits": 3, "group": 128, "scale": np.float16, "zero_point": np.uint8},
    "hqq": {"bits": 4, "group": 64, "scale": np.float16, "zero_point": np.float16},
}


def random_codes(name: str, n: int, k: int, seed: int = 0) -> tuple[CodedWeight, np.ndarray]:
    """A weight [n, k] of the kind of this name, and its elements in float64."""
    rng = np.random.default_rng(seed)
    kind = dict(KINDS[name])
    bits, group, groups = kind["bits"], kind["group"], k // kind["group"]
    codes = rng.integers(0, 1 << bits, (n, k)).astype(np.uint8)
    low_bits = {2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 8: 8}[bits]
    arrays = {"codes": pack_bits(codes & ((1 << low_bits) - 1), low_bits)}
    if bits > low_bits:
        arrays["high"] = pack_bits(codes >> low_bits, bits - low_bits)
    values = np.asarray(kind["levels"], np.float32)[codes] if "levels" in kind else codes - float(kind.get("offset", 0))
    wide = values.astype(np.float64)
    arrays["scale"] = _numbers(rng, kind["scale"], n, groups)
    scale = arrays["scale"].astype(np.float64)
    if "super" in kind:
        per_row = 1 if kind["super"] is None else k // kind["super"]
        dtype = np.float32 if kind["super"] is None else np.float16
        arrays["super_scale"] = rng.uniform(1e-4, 2e-3, (n, per_row)).astype(dtype)
        scale = scale * np.repeat(arrays["super_scale"].astype(np.float64), groups // per_row, axis=1)
    if "zero_point" in kind:
        arrays["zero_point"] = rng.integers(0, 1 << bits, (n, groups)).astype(kind["zero_point"])
        wide = wide - np.repeat(arrays["zero_point"].astype(np.float64), group, axis=1)
    wide = wide * np.repeat(scale, group, axis=1)
    if "minimum" in kind:
        arrays["minimum"] = _numbers(rng, kind["minimum"], n, groups)
        minimum = arrays["minimum"].astype(np.float64)
        if "super" in kind:
            arrays["super_minimum"] = -rng.uniform(1e-4, 2e-3, (n, k // kind["super"])).astype(np.float16)
            minimum = minimum * np.repeat(arrays["super_minimum"].astype(np.float64), groups // (k // 256), axis=1)
        wide = wide + np.repeat(minimum, group, axis=1)
    return CodedWeight(**arrays, bits=bits, offset=kind.get("offset", 0), levels=kind.get("levels")), wide


def pack_bits(numbers: np.ndarray, bits: int) -> np.ndarray:
    """uint8 [n, k] of numbers below 2 ** bits -> uint8 [n, k * bits / 8], earlier ones in lower bits."""
    parts = numbers.reshape(len(numbers), -1, 8 // bits)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return np.bitwise_or.reduce(parts << shifts, axis=-1).astype(np.uint8)


def _numbers(rng: np.random.Generator, dtype: type, n: int, groups: int) -> np.ndarray:
    if np.dtype(dtype).kind in "ui":
        low = 0 if np.dtype(dtype).kind == "u" else -32
        return rng.integers(low, 63, (n, groups)).astype(dtype)
    largest = 8.0 if dtype is ml_dtypes.float8_e4m3fn else 0.1
    return rng.uniform(largest / 100, largest, (n, groups)).astype(dtype)
