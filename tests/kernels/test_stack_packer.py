"""Stacks of experts of which only some have scales that are 8-bit codes: every expert keeps its values."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxis.kernels import native
from jaxis.kernels.weights import CodedWeight, QuantizedWeight, WeightScheme, dequantize, pack, quantize
from jaxis.kernels.weights.stack_packer import StackPacker

SHAPE = (40, 128)
RNG = np.random.default_rng(0)


def int8(group_size: int, has_codes: bool) -> QuantizedWeight:
    weight = quantize(RNG.standard_normal(SHAPE).astype(np.float32), WeightScheme("int8", group_size))
    assert isinstance(weight, QuantizedWeight)
    if has_codes:
        return weight
    return dataclasses.replace(weight, scale=RNG.uniform(0.1, 1, weight.scale.shape).astype(ml_dtypes.bfloat16))


def affine(group_size: int, has_codes: bool) -> CodedWeight:
    groups = (SHAPE[0], SHAPE[1] // group_size)
    scale, minimum = RNG.uniform(0.1, 1, groups), RNG.uniform(-1, -0.1, groups)
    if has_codes:
        scale, minimum = RNG.integers(1, 256, groups) / 128, RNG.integers(-127, 128, groups) / 64
    codes = RNG.integers(0, 256, (SHAPE[0], SHAPE[1] // 2), np.uint8)
    return CodedWeight(codes, scale.astype(ml_dtypes.bfloat16), minimum=minimum.astype(ml_dtypes.bfloat16))


@pytest.mark.sampled(4)
@pytest.mark.skipif(not native.usable(), reason="needs the native kernels")
@pytest.mark.parametrize("order", [(True, False, True), (False, True, False), (True, True, False)])
@pytest.mark.parametrize(("make", "group_size"), [(int8, 32), (int8, 64), (affine, 16), (affine, 32)])
def test_every_expert_keeps_its_values(make, group_size: int, order: tuple[bool, ...]) -> None:
    weights = [make(group_size, has_codes) for has_codes in order]
    assert {pack(weight).format.scale for weight in weights} == {"uint8", "bfloat16"}
    packer = StackPacker(len(weights))
    for expert, weight in enumerate(weights):
        packer.pack(expert, lambda allocate, weight=weight: pack(weight, allocate=allocate))
    stack = packer.stack()
    assert stack.format.scale == "bfloat16"
    for expert, weight in enumerate(weights):
        one = dataclasses.replace(stack, data=jnp.asarray(stack.data[expert]))
        np.testing.assert_array_equal(dequantize(one), dequantize(weight))


@pytest.mark.skipif(not native.usable(), reason="needs the native kernels")
def test_other_differences_are_refused() -> None:
    packer = StackPacker(2)
    packer.pack(0, lambda allocate: pack(int8(32, True), allocate=allocate))
    with pytest.raises(ValueError, match="has a different type from those of the other experts"):
        packer.pack(1, lambda allocate: pack(int8(64, False), allocate=allocate))
