"""Values that torchao's tensors stand for, by their own `dequantize`."""

import json

import ml_dtypes
import numpy as np
import pytest
import torch
from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int4Tensor,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    MappingType,
    PerAxis,
    PerGroup,
    PerTensor,
    quantize_,
)

from jaxis.errors import ConfigError
from jaxis.kernels.weights import BlockScaledWeight, CodedWeight, QuantizedWeight
from jaxis.quantization.checkpoints.torchao import read_format
from tests.quantization.foreign_quantizers import random_weight
from tests.support.dequantized import dequantize

SHAPE = (208, 192)


def intx(bits, granularity, mapping):
    return IntxWeightOnlyConfig(
        weight_dtype=getattr(torch, f"int{bits}"), granularity=granularity, mapping_type=mapping
    )


def quantized(config):
    model = torch.nn.Sequential(torch.nn.Linear(SHAPE[1], SHAPE[0], bias=False))
    model.load_state_dict({"0.weight": random_weight(*SHAPE)})
    quantize_(model, config)
    return model[0].weight


def held(tensor):
    """The weight in memory of a torchao tensor that was saved."""
    stored, metadata = flatten_tensor_state_dict({"0.weight": tensor})
    stored_as = read_format("0.weight", metadata["0.weight"])
    arrays = {name.removeprefix("0."): to_numpy(value) for name, value in stored.items()}
    specs = stored_as.tensors(SHAPE)
    assert specs.keys() == arrays.keys()
    for name, spec in specs.items():
        assert spec.fits(arrays[name].shape), name
        assert arrays[name].dtype in spec.dtypes, name
    return stored_as.assemble(arrays, SHAPE)


def to_numpy(tensor):
    low_precision = {
        torch.bfloat16: "bfloat16",
        torch.float8_e4m3fn: "float8_e4m3fn",
        torch.float8_e8m0fnu: "float8_e8m0fnu",
    }
    if tensor.dtype not in low_precision:
        return tensor.numpy()
    bits = tensor.view(torch.uint8 if tensor.dtype.itemsize == 1 else torch.int16).numpy()
    return bits.view(getattr(ml_dtypes, low_precision[tensor.dtype]))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (Int8WeightOnlyConfig(version=2), QuantizedWeight),
        (Int8WeightOnlyConfig(version=2, granularity=PerTensor()), QuantizedWeight),
        (Float8WeightOnlyConfig(version=2), BlockScaledWeight),
        *[
            (intx(bits, granularity, mapping), CodedWeight)
            for bits in range(1, 8)
            for granularity in (PerGroup(32), PerAxis(0))
            for mapping in (MappingType.SYMMETRIC, MappingType.ASYMMETRIC)
        ],
        (intx(8, PerGroup(64), MappingType.SYMMETRIC), QuantizedWeight),
        (intx(8, PerGroup(64), MappingType.ASYMMETRIC), CodedWeight),
        (NVFP4WeightOnlyConfig(), CodedWeight),
    ],
    ids=str,
)
def test_quantized_layers(config, kind):
    tensor = quantized(config)
    weight = held(tensor)
    assert isinstance(weight, kind)
    np.testing.assert_array_equal(dequantize(weight), tensor.dequantize().numpy())


@pytest.mark.parametrize("is_swizzled", [False, True])
@pytest.mark.parametrize("element", [torch.float8_e4m3fn, torch.float4_e2m1fn_x2], ids=str)
def test_microscaling(element, is_swizzled):
    wide = random_weight(*SHAPE)
    tensor = MXTensor.to_mx(wide, element, 32, ScaleCalculationMode.FLOOR, is_swizzled_scales=is_swizzled)
    weight = held(tensor)
    assert isinstance(weight, BlockScaledWeight)
    np.testing.assert_array_equal(dequantize(weight), tensor.dequantize(torch.float32).numpy())


@pytest.mark.parametrize("is_swizzled", [False, True])
@pytest.mark.parametrize("scale", [None, 0.0123])
def test_nvfp4(scale, is_swizzled):
    factor = None if scale is None else torch.tensor(scale)
    tensor = NVFP4Tensor.to_nvfp4(random_weight(*SHAPE), per_tensor_scale=factor, is_swizzled_scales=is_swizzled)
    weight = held(tensor)
    assert weight.nbytes <= SHAPE[0] * (SHAPE[1] * 9 / 16 + 4)
    np.testing.assert_array_equal(dequantize(weight), tensor.dequantize(torch.float32).numpy())


@pytest.mark.parametrize("rows", [1, 64])
def test_float8_in_blocks(rows):
    from torchao.quantization import Float8Tensor

    scale = random_weight(-(-SHAPE[0] // rows), SHAPE[1] // 64).abs()
    wide = random_weight(*SHAPE)
    tensor = Float8Tensor(wide.to(torch.float8_e4m3fn), scale, block_size=[rows, 64], dtype=torch.float32)
    expanded = scale.repeat_interleave(rows, 0)[: SHAPE[0]].repeat_interleave(64, 1)
    np.testing.assert_array_equal(dequantize(held(tensor)), (tensor.qdata.float() * expanded).numpy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_int4_of_gpus(dtype):
    """Only a GPU can make one: its elements by the arithmetic of the library that torchao quantizes with."""
    wide, group = random_weight(*SHAPE), 64
    groups = wide.reshape(SHAPE[0], -1, group)
    scale = (groups.amax(-1) - groups.amin(-1)) / 15
    zero_point = groups.amin(-1) + 8 * scale
    q = ((groups - groups.amin(-1, keepdim=True)) / scale[..., None]).round().clamp(0, 15).to(torch.int8) - 8
    scale, zero_point = scale.to(dtype), zero_point.to(dtype)
    flat = q.reshape(SHAPE)
    packed = (flat[:, ::2] & 15) | (flat[:, 1::2] << 4)
    tensor = Int4Tensor(packed, scale.T.contiguous(), zero_point.T.contiguous(), [1, group], torch.Size(SHAPE))
    expected = (q.float() * scale.float()[..., None] + zero_point.float()[..., None]).reshape(SHAPE)
    weight = held(tensor)
    np.testing.assert_array_equal(dequantize(weight), expected.numpy())
    assert np.abs(np.asarray(dequantize(weight)) - wide.numpy()).max() < 0.3  # half a step


def described(kind, data, names=("qdata", "scale")):
    return json.dumps({"_type": kind, "_data": data, "_tensor_data_names": list(names)})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            described("Int4TilePackedTo4dTensor", {}),
            "Int4TilePackedTo4dTensor of torchao, whose elements are in the order",
        ),
        (described("Int4PlainInt32Tensor", {}), "Int4PlainInt32Tensor of torchao, whose elements are in the order"),
        (
            described("AffineQuantizedTensor", {}),
            "AffineQuantizedTensor of torchao, which is not supported; known: Int8T",
        ),
        (
            described("Int8Tensor", {"block_size": [1, 64]}, ["qdata", "act_pre_scale"]),
            "Int8Tensor of torchao with 'act_pre_s",
        ),
        (described("Int8Tensor", {"block_size": [1, -64]}), "metadata in the file cannot be understood"),
        (described("Int8Tensor", {"block_size": 64}), "metadata in the file cannot be understood"),
        (described("Int4Tensor", {"block_size": [2, 64]}), "metadata in the file cannot be understood"),
        (
            described("IntxUnpackedToInt8Tensor", {"block_size": [1, 8], "target_dtype": {"_data": "int9"}}),
            "cannot be und",
        ),
        (
            described("MXTensor", {"elem_dtype": {"_data": "fp6_e2m3"}, "block_size": 32}),
            "MXTensor of fp6_e2m3 in blocks",
        ),
        (described("NVFP4Tensor", {"block_size": 32}), "metadata in the file cannot be understood"),
        ("[]", "metadata in the file cannot be understood"),
        ("{", "metadata in the file cannot be understood"),
        ("[" * 100_000, "metadata in the file cannot be understood"),
    ],
)
def test_what_is_not_supported_is_named(text, message):
    with pytest.raises(ConfigError, match=message):
        read_format("model.layers.0.mlp.up_proj.weight", text)


def test_plain_tensors_are_none_of_them():
    assert read_format("model.norm.weight", '{"_type": "Tensor"}') is None
