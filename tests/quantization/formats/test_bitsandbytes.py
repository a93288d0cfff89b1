"""Values that bitsandbytes' tensors stand for, by its own functions."""

import json

import numpy as np
import pytest
import torch

from jaxis.kernels.weights import CodedWeight, QuantizedWeight
from jaxis.quantization.formats.bitsandbytes_4bit import Bitsandbytes4BitFormat
from jaxis.quantization.formats.bitsandbytes_8bit import Bitsandbytes8BitFormat
from tests.quantization.foreign_quantizers import bitsandbytes_4bit, bitsandbytes_8bit, random_weight
from tests.support.dequantized import dequantize

NUMPY_STORAGE = {torch.uint8: np.uint8, torch.float32: np.float32, torch.float16: np.float16}
STATE = "weight.quant_state.bitsandbytes__nf4"


def arrays(tensors):
    return {name: tensor.numpy() for name, tensor in tensors.items()}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize(
    ("shape", "block_size", "storage"),
    [
        ((48, 128), 64, torch.uint8),
        ((300, 256), 64, torch.float32),  # several nested blocks, the last one cut off
        ((33, 96), 64, torch.float16),  # blocks that straddle rows, and a last one that is cut off
        ((8, 40), 64, torch.uint8),
        ((7, 64), 256, torch.uint8),  # blocks of several rows
        ((4, 4096), 2048, torch.uint8),
    ],
)
def test_4_bits(quant_type, is_nested, shape, block_size, storage):
    tensors, expected = bitsandbytes_4bit(
        "weight",
        random_weight(*shape),
        quant_type=quant_type,
        compress_statistics=is_nested,
        quant_storage=storage,
        blocksize=block_size,
    )
    stored_as = Bitsandbytes4BitFormat(quant_type, is_nested, np.dtype(NUMPY_STORAGE[storage]), block_size)
    specs = stored_as.tensors(shape)
    assert specs.keys() == tensors.keys()
    for name, spec in specs.items():
        assert spec.fits(tuple(tensors[name].shape)), name
    weight = stored_as.assemble(arrays(tensors), shape)
    assert isinstance(weight, CodedWeight)
    assert weight.shape == shape
    np.testing.assert_array_equal(dequantize(weight), expected.numpy())


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"blocksize": 128}, "says blocksize=128, where 64 is expected"),
        ({"shape": [128, 48]}, r"says shape=\[128, 48\], where \[48, 128\] is expected"),
        ({"nested_offset": "nan"}, "says nested_offset='nan', which is not a number"),
        ({"nested_offset": float("inf")}, "says nested_offset=inf, which is not a number"),
        ("[1]", "not a JSON object"),
        ("[" * 100_000, "not a JSON object"),
        ("", "not a JSON object"),
    ],
)
def test_a_state_that_contradicts_the_tensors_is_refused(state, message):
    tensors = arrays(bitsandbytes_4bit("weight", random_weight(48, 128))[0])
    text = state if isinstance(state, str) else json.dumps(json.loads(tensors[STATE].tobytes()) | state)
    tensors[STATE] = np.frombuffer(text.encode(), np.uint8)
    with pytest.raises(ValueError, match=message):
        Bitsandbytes4BitFormat("nf4", is_nested=True).assemble(tensors, (48, 128))


@pytest.mark.parametrize("name", ["weight.nested_absmax", "weight.quant_map"])
def test_scales_and_levels_must_be_finite(name):
    tensors = arrays(bitsandbytes_4bit("weight", random_weight(48, 128))[0])
    tensors[name] = np.full_like(tensors[name], np.nan)
    with pytest.raises(ValueError, match="not all finite"):
        Bitsandbytes4BitFormat("nf4", is_nested=True).assemble(tensors, (48, 128))


def test_8_bits():
    tensors, expected = bitsandbytes_8bit("weight", random_weight(48, 96))
    stored_as = Bitsandbytes8BitFormat()
    for name, spec in stored_as.tensors((48, 96)).items():
        assert spec.fits(tuple(tensors[name].shape)), name
    weight = stored_as.assemble(arrays(tensors), (48, 96))
    assert isinstance(weight, QuantizedWeight)
    np.testing.assert_array_equal(weight.qvalue, tensors["weight"].numpy())
    # bitsandbytes rounds twice, `q * SCB` and then its product with 1 / 127; one scale for both rounds elsewhere.
    np.testing.assert_allclose(dequantize(weight), expected.numpy(), rtol=2**-22)


def test_8_bits_in_the_order_of_a_gpu_are_refused():
    tensors = arrays(bitsandbytes_8bit("weight", random_weight(48, 96))[0])
    tensors["weight_format"] = np.asarray(2, np.uint8)
    with pytest.raises(ValueError, match="in the order col_turing of a GPU's kernels"):
        Bitsandbytes8BitFormat().assemble(tensors, (48, 96))
