"""Stacks of experts' weights of every kind that kernels read, and what they stand for in float64."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxis.kernels.weights import BlockScaledWeight, CodedWeight, QuantizedWeight
from tests.support.quantized_products import expected_weight, random_blocks

Made = tuple[Any, np.ndarray]


def _floats(dtype: Any) -> Callable[[int, int, int], Made]:
    def make(n: int, k: int, seed: int) -> Made:
        weight = np.random.default_rng(seed).standard_normal((n, k)).astype(dtype)
        return weight, weight.astype(np.float64)

    return make


def _integers(
    qtype: str, group_size: int | None, scale_type: Any, *, has_zero_point: bool = False
) -> Callable[..., Made]:
    def make(n: int, k: int, seed: int) -> Made:
        rng = np.random.default_rng(seed)
        groups = 1 if group_size is None else k // group_size
        scale = rng.uniform(0.01, 0.1, (n, groups)).astype(scale_type)
        zero_point = rng.integers(0, 16, (n, groups)).astype(np.uint8) if has_zero_point else None
        if qtype == "int8":
            qvalue = rng.integers(-127, 128, (n, k)).astype(np.int8)
        else:
            qvalue = rng.integers(0, 256, (n, k // 2)).astype(np.uint8)
        weight = QuantizedWeight(qvalue, scale, zero_point)
        return weight, expected_weight(weight)

    return make


def _affine(group_size: int, *, has_units: bool) -> Callable[[int, int, int], Made]:
    """int4 as `--quantization int4` makes it, scales and minima codes of a unit of their row; without units as MLX."""

    def make(n: int, k: int, seed: int) -> Made:
        rng = np.random.default_rng(seed)
        codes, of_groups = rng.integers(0, 16, (n, k)).astype(np.uint8), (n, k // group_size)
        if has_units:
            scale, minimum = rng.integers(0, 256, of_groups), rng.integers(-127, 128, of_groups)
            units = [(2.0 ** rng.integers(-10, -7, (n, 1))).astype(np.float32) for _ in range(2)]
            arrays: tuple[np.ndarray, ...] = (scale.astype(np.uint8), minimum.astype(np.int8), *units)
        else:
            scale, minimum = rng.uniform(0.01, 0.1, of_groups), rng.uniform(-1, 0, of_groups)
            arrays = (scale.astype(ml_dtypes.bfloat16), minimum.astype(ml_dtypes.bfloat16))
            units = [np.ones((n, 1))] * 2
        wide = [np.repeat(a.astype(np.float64) * u, group_size, 1) for a, u in zip(arrays[:2], units, strict=True)]
        names = ("scale", "minimum", "super_scale", "super_minimum")
        packed = codes[:, ::2] | codes[:, 1::2] << 4
        return CodedWeight(packed, **dict(zip(names, arrays, strict=False))), codes * wide[0] + wide[1]

    return make


def _rows_of_fp8(n: int, k: int, seed: int) -> Made:
    weight, _ = random_blocks("float8_e4m3fn", n, k, seed)
    scale = np.random.default_rng(seed).uniform(1e-3, 1e-2, (n, 1)).astype(np.float32)
    return BlockScaledWeight(weight.value, scale, (1, k)), weight.value.astype(np.float64) * scale


def _whole_fp8(n: int, k: int, seed: int) -> Made:
    weight, _ = random_blocks("float8_e4m3fn", n, k, seed)
    scale = np.full((1, 1), 0.00375 * (1 + seed), np.float32)
    return BlockScaledWeight(weight.value, scale, (n, k)), weight.value.astype(np.float64) * scale


_SMALL = (256, 256)  # (out, in)

KINDS: Mapping[str, Callable[[int, int, int], Made]] = {
    "float32": _floats(np.float32),
    "bfloat16": _floats(ml_dtypes.bfloat16),
    "int8": _integers("int8", None, np.float32),
    "int8 in groups of 32": _integers("int8", 32, ml_dtypes.bfloat16),
    "int8 in groups of 128": _integers("int8", 128, np.float32),
    "int4": _integers("int4", None, np.float32, has_zero_point=True),
    "int4 in groups of 32": _integers("int4", 32, ml_dtypes.bfloat16),
    "int4 in groups of 128": _integers("int4", 128, np.float16, has_zero_point=True),
    "int4 with minima": _affine(32, has_units=True),
    "int4 with minima in groups of 256": _affine(256, has_units=False),
    "fp8 in blocks": lambda n, k, seed: random_blocks("float8_e4m3fn", n, k, seed),
    "fp8 by rows": _rows_of_fp8,
    "fp8": _whole_fp8,
    "MXFP4": lambda n, k, seed: random_blocks("float4_e2m1fn", n, k, seed),
}
"""Name -> (out, in, seed) -> a weight of host arrays, and what it stands for."""


def weight_stack(kind: str, num_groups: int, n: int, k: int) -> tuple[Any, np.ndarray]:
    """A stack of X weights [X, out, in] as arrays of JAX, and what it stands for, float64."""
    made = [KINDS[kind](n, k, seed) for seed in range(num_groups)]
    stack = jax.tree.map(lambda *arrays: jnp.asarray(np.stack(arrays)), *(weight for weight, _ in made))
    return stack, np.stack([expected for _, expected in made])


def abstract_stack(
    kind: str, num_groups: int, n: int, k: int, sharding: Callable[[tuple[int, ...]], jax.sharding.Sharding]
) -> Any:
    """A stack as shapes and types only; `sharding` maps an array's shape to how it is placed."""

    # Values do not matter, so that a small weight tells the types and how its arrays grow.
    small, _ = KINDS[kind](*_SMALL, 0)

    def grown(leaf: np.ndarray) -> jax.ShapeDtypeStruct:
        sizes = zip(leaf.shape, (n, k), _SMALL, strict=True)
        shape = (num_groups, *(size if size == 1 else -(-wanted * size // whole) for size, wanted, whole in sizes))
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding(shape))

    stack = jax.tree.map(grown, small)
    if kind in ("fp8", "fp8 by rows"):
        return dataclasses.replace(stack, block_shape=(n, k) if kind == "fp8" else (1, k))
    return stack


def stack_bytes(stack: Any) -> int:
    """Bytes of a stack's arrays."""
    return sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(stack))


def grouped_product(x: np.ndarray, stack: np.ndarray, group_sizes: np.ndarray) -> np.ndarray:
    """float64 [N, out]: each group's rows times its weight; rows past the last group are 0."""
    group = np.repeat(np.arange(len(group_sizes)), group_sizes)
    y = np.zeros((len(x), stack.shape[1]))
    for row, g in enumerate(group):
        y[row] = x[row].astype(np.float64) @ stack[g].T
    return y
