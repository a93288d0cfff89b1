"""Checkpoints of fp8 with one scale a weight: what they mean to torch and transformers, and what stays in memory."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from jaxis.errors import CheckpointError
from jaxis.kernels.weights import BlockScaledWeight
from tests.support.block_checkpoints import assert_logits, replace_tensors
from tests.support.dequantized import dequantize
from tests.support.quantized_models import assert_equal, load, values
from tests.support.tiny_checkpoints import write_checkpoint

FP8 = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": WEIGHTS}},
    "ignore": ["lm_head"],
}


def quantize(weight):
    scale = weight.abs().max() / 448
    return (weight / scale).to(torch.float8_e4m3fn), scale


def write(folder, source, config, scale_shape=(), static=True):
    """(`folder`/fp8, `folder`/wide): `source` in fp8, and with what that stands for."""
    stored, quantized, wide = load_file(source / "model.safetensors"), {}, {}
    for name, tensor in stored.items():
        if not name.endswith("_proj.weight"):
            quantized[name] = wide[name] = tensor
            continue
        value, scale = quantize(tensor.float())
        quantized |= {name: value, f"{name}_scale": scale.reshape(scale_shape)}
        if static:
            quantized[name.removesuffix("weight") + "input_scale"] = torch.full(scale_shape, 0.01)
        wide[name] = value.float() * scale
    return (
        replace_tensors(folder / "fp8", source, quantized, quantization_config=config),
        replace_tensors(folder / "wide", source, wide),
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "qwen3"
    return write_checkpoint(folder, tokenizer=False, hidden_size=96, intermediate_size=160, tie_word_embeddings=False)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("config", "scale_shape", "static"),
    [(FP8, (), True), (FP8 | {"activation_scheme": "dynamic"}, (1,), False), (COMPRESSED, (1,), True)],
    ids=["fp8 static", "fp8 dynamic", "compressed-tensors"],
)
def test_logits_are_those_of_the_weights_that_fp8_stands_for(source, tmp_path, config, scale_shape, static):
    assert_logits(*write(tmp_path, source, config, scale_shape, static))


@pytest.mark.slow
def test_dequantized_weights_are_torchs_to_the_bit(source, tmp_path):
    fp8, wide = write(tmp_path, source, FP8)
    held, expected = values(load(fp8)), load_file(wide / "model.safetensors")
    assert held.keys() == expected.keys()
    for name, weight in held.items():
        assert isinstance(weight, BlockScaledWeight) == name.endswith("_proj.weight")
        np.testing.assert_array_equal(dequantize(weight), expected[name].numpy(), err_msg=name)
    for native in (False, True):
        assert_equal(load(fp8, "dequantize", native=native), load(wide, native=native))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("weight_scale", lambda t: t.repeat(3), r"weight_scale' has shape \[3\] in the checkpoint, \[\] in the model"),
        ("weight_scale", lambda t: t * torch.nan, "q_proj has a weight whose values or scales are not all finite"),
        ("weight_scale", lambda t: None, "1 of the model's parameters are not in the checkpoint: .*q_proj.weight_sc"),
    ],
)
def test_tensors_that_do_not_fit_are_named(source, tmp_path, name, change, message):
    fp8, _ = write(tmp_path, source, FP8)
    stored = load_file(fp8 / "model.safetensors")
    full_name = f"model.layers.0.self_attn.q_proj.{name}"
    stored[full_name] = change(stored[full_name])
    folder = replace_tensors(tmp_path / "changed", fp8, {n: t for n, t in stored.items() if t is not None})
    with pytest.raises(CheckpointError, match=message):
        load(folder)
