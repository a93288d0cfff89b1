"""Checkpoints quantized by HQQ, with tensors as its HQQLinear encodes them for safetensors."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from jaxis.config.hf_config import HFConfig
from jaxis.errors import CheckpointError, ConfigError
from jaxis.kernels.weights import CodedWeight
from jaxis.quantization.checkpoint_formats import quantization_of_checkpoint
from tests.quantization.packed_integers import write
from tests.support.block_checkpoints import replace_tensors, transformers_logits
from tests.support.dequantized import dequantize
from tests.support.quantized_models import IDS, assert_equal, load, logits, values
from tests.support.quick_rows import quick_rows
from tests.support.tiny_checkpoints import write_checkpoint

PARAMETERS = {"axis": 1, "channel_wise": True, "group_size": 32, "nbits": 4, "optimize": True, "round_zero": False}
HQQ = {
    "quant_method": "hqq",
    "quant_config": {"weight_quant_params": PARAMETERS, "scale_quant_params": None, "zero_quant_params": None},
    "skip_modules": ["lm_head"],
}
PACKINGS = {8: "8bit_u8", 4: "4bit_u8", 3: "3bit_32", 2: "2bit_u8", 1: "1bit_u8"}


def pack_bits(numbers, bits):
    """The numbers [M, g] in the steps of hqq's BitPack."""
    if bits == 3:
        step = -(-len(numbers) // 10)
        filled = np.zeros((10 * step, numbers.shape[1]), np.int32)
        filled[: len(numbers)] = numbers
        return np.bitwise_or.reduce([filled[i * step : (i + 1) * step] << 27 - 3 * i for i in range(10)])
    step = len(numbers) * bits // 8
    shifts = range(8 - bits, -1, -bits)
    parts = [numbers[i * step : (i + 1) * step] << shift for i, shift in enumerate(shifts)]
    return np.bitwise_or.reduce(parts).astype(np.uint8)


def text(value):
    return np.array([ord(letter) for letter in value], np.uint8)


def hqq_tensors(weight, bits=4, group_size=32):
    """The tensors, and the weight that they stand for, as float32."""
    groups = weight.reshape(-1, group_size).astype(np.float64)
    low, high = groups.min(1, keepdims=True), groups.max(1, keepdims=True)
    scale = ((high - low) / ((1 << bits) - 1)).astype(np.float16)
    zero = (-low / scale).astype(np.float16)
    numbers = np.clip(np.rint(groups / scale + zero), 0, (1 << bits) - 1).astype(np.uint8)
    wide = (numbers.astype(np.float32) - zero.astype(np.float32)) * scale.astype(np.float32)
    flags = {"view_as_float": 0, "quant_scale": 0, "quant_zero": 0, "offload_meta": 0, "channel_wise": 1}
    flags |= {"encoded_state_dict": 1, "stores_quant_config": 1, "optimize": 1, "round_zero": 0}
    numbers_of = {"nbits": bits, "group_size": group_size, "axis": 1}
    return {
        "W_q": pack_bits(numbers, bits),
        "scale": scale,
        "zero": zero,
        "shape": np.array(weight.shape, np.int64),
        "packing": text(PACKINGS[bits]),
        "unpack_view_dtype": text("torch.int32" if bits == 3 else "torch.uint8"),
        "compute_dtype": text("torch.float16"),
        **{name: np.array(value, np.uint8) for name, value in flags.items()},
        **{name: np.array(value, np.int32) for name, value in numbers_of.items()},
    }, wide.reshape(weight.shape)


def packs(**how):
    return lambda module, weight: hqq_tensors(weight, **how) if module.endswith("_proj") else None


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("source") / "qwen2", "qwen2", tokenizer=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bits", "group_size"),
    quick_rows([(8, 32), (4, 32), (4, 16), (3, 32), (2, 32), (1, 8)], [(3, 32)]),
)
def test_logits_are_those_of_the_weights_that_the_integers_stand_for(source, tmp_path, bits, group_size):
    packed, wide = write(tmp_path, source, packs(bits=bits, group_size=group_size), HQQ)
    expected = load_file(wide / "model.safetensors")
    for name, weight in values(load(packed)).items():
        assert isinstance(weight, CodedWeight) == name.endswith("_proj.weight")
        np.testing.assert_array_equal(dequantize(weight), expected[name].float().numpy(), err_msg=name)
    reference = transformers_logits(wide, IDS)
    for native in (False, True):
        actual = logits(load(packed, native=native))
        np.testing.assert_allclose(actual, reference, rtol=0, atol=1e-5 * np.abs(reference).max())
    assert_equal(load(packed, "dequantize", native=True), load(wide, native=True))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("axis", np.array(0, np.int32), r"whose axis is \[0\], but must be 1"),
        ("view_as_float", np.array(1, np.uint8), r"whose view_as_float is \[1\], but must be 0"),
        ("quant_zero", np.array(1, np.uint8), r"whose quant_zero is \[1\], but must be 0"),
        ("shape", np.array([64, 96], np.int64), r"whose shape is \[64, 96\], but must be \[96, 64\]"),
        ("packing", text("2bit_u8"), "whose packing is '2bit_u8', but W_q has the shape of '4bit_u8'"),
        ("zero", np.full((192, 1), np.nan, np.float16), "whose scales or zero points are not all finite"),
    ],
)
def test_what_describes_a_weight_must_agree_with_it(source, tmp_path, name, value, message):
    packed, _ = write(tmp_path, source, packs(), HQQ)
    stored = load_file(packed / "model.safetensors")
    stored[f"model.layers.0.mlp.up_proj.{name}"] = torch.from_numpy(value)
    folder = replace_tensors(tmp_path / "changed", packed, stored)
    with pytest.raises(CheckpointError, match=f"up_proj has a weight {message}"):
        load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": None}, "up_proj has no tensor 'scale': scales that are quantized too are not read"),
        ({"scale": torch.ones(1, 192)}, r"up_proj.scale has shape \[1, 192\]: groups of rows \(axis=0\) are not read"),
        ({"W_q": torch.zeros(96, 32).half()}, r"up_proj.W_q has shape \[96, 32\] and type float16, which is no pack"),
        ({"scale": torch.ones(191, 1)}, "which is no packing of 191 groups"),
        ({"scale": torch.ones(0, 1), "W_q": torch.zeros(0, 32).byte()}, "which is no packing of 0 groups"),
    ],
)
def test_other_layouts_are_refused(source, tmp_path, change, message):
    packed, _ = write(tmp_path, source, packs(), HQQ)
    stored = load_file(packed / "model.safetensors")
    stored |= {f"model.layers.0.mlp.up_proj.{name}": tensor for name, tensor in change.items()}
    folder = replace_tensors(tmp_path / "changed", packed, {n: t for n, t in stored.items() if t is not None})
    with pytest.raises(ConfigError, match=message):
        load(folder)


def test_a_config_that_only_asks_for_quantization(source):
    with pytest.raises(ConfigError, match="asks for the weights to be quantized by hqq when they are loaded"):
        quantization_of_checkpoint(HFConfig({"quantization_config": HQQ}), None, {})


def test_keys_that_are_not_known_are_refused():
    with pytest.raises(ConfigError, match="has the key 'rotation', which is not supported"):
        quantization_of_checkpoint(HFConfig({"quantization_config": HQQ | {"rotation": True}}), None)
