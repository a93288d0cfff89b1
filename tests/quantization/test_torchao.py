"""Checkpoints quantized by torchao, end to end: written by transformers, and with single layers quantized."""

import json

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerGroup,
    quantize_,
)

from jaxis.errors import CheckpointError, ConfigError
from jaxis.kernels.weights import BlockScaledWeight, CodedWeight, QuantizedWeight
from tests.quantization.foreign_quantizers import write_quantized
from tests.support.block_checkpoints import assert_logits, replace_tensors
from tests.support.dequantized import dequantize
from tests.support.quantized_models import IDS, load, logits, values
from tests.support.quick_rows import quick_rows
from tests.support.tiny_checkpoints import write_checkpoint

KINDS = {
    "int8": (Int8WeightOnlyConfig(version=2), QuantizedWeight),
    "float8": (Float8WeightOnlyConfig(version=2), BlockScaledWeight),
    "int4": (IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)), CodedWeight),
    "nvfp4": (NVFP4WeightOnlyConfig(), CodedWeight),
}
CONFIG = {"quant_method": "torchao", "quant_type": {"default": {}}, "modules_to_not_convert": None}
SIZES = {"hidden_size": 96, "intermediate_size": 160}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "qwen3"
    return write_checkpoint(folder, tokenizer=False, tie_word_embeddings=False, **SIZES)


def write(folder, source, config):
    """`write_quantized` with layers quantized by torchao and stored by its own function."""
    metadata = {"format": "pt"}
    names = list(load_file(source / "model.safetensors"))

    def quantize(name, weight):
        layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        layer.load_state_dict({"weight": weight})
        quantize_(layer, config)
        tensors, described = flatten_tensor_state_dict({name: layer.weight})
        metadata.update(described)
        return tensors, layer.weight.dequantize().detach().clone()

    low_precision, wide = write_quantized(folder, source, quantize, CONFIG)
    plain = {name: '{"_type": "Tensor"}' for name in names if name not in metadata}
    metadata |= plain | {"tensor_names": json.dumps(names)}
    tensors = load_file(low_precision / "model.safetensors")
    save_file(tensors, low_precision / "model.safetensors", metadata=metadata)
    return low_precision, wide


@pytest.mark.sampled
@pytest.mark.parametrize("kind", quick_rows(KINDS, ["int8", "float8"]))
def test_logits_are_those_of_the_weights_that_the_file_stands_for(source, tmp_path, kind):
    config, held_as = KINDS[kind]
    low_precision, wide = write(tmp_path, source, config)
    stored = load_file(wide / "model.safetensors")
    for name, weight in values(assert_logits(low_precision, wide)).items():
        assert isinstance(weight, held_as) == name.endswith("_proj.weight")
        np.testing.assert_array_equal(dequantize(weight), stored[name].numpy(), err_msg=name)


def test_what_transformers_saves(source, tmp_path):
    settings = transformers.TorchAoConfig(Int8WeightOnlyConfig(version=2))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, quantization_config=settings
    ).eval()
    model.save_pretrained(tmp_path / "saved")
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0].numpy()
    held = load(tmp_path / "saved")
    assert isinstance(values(held)["model.layers.0.mlp.up_proj.weight"], QuantizedWeight)
    np.testing.assert_allclose(logits(held), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_parameters_other_than_weights_are_refused(source, tmp_path):
    low_precision, _ = write(tmp_path, source, KINDS["int8"][0])
    path = low_precision / "model.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    name = "model.layers.0.mlp.up_proj.weight"
    metadata["model.layers.0.mlp.experts.gate_up_proj"] = metadata.pop(name)
    save_file(load_file(path), path, metadata=metadata)
    with pytest.raises(
        ConfigError, match=r"experts.gate_up_proj, which is not a layer's weight: this is not supported"
    ):
        load(low_precision)


def test_tensors_that_do_not_fit_are_named(source, tmp_path):
    low_precision, _ = write(tmp_path, source, KINDS["int8"][0])
    stored = load_file(low_precision / "model.safetensors")
    with safe_open(low_precision / "model.safetensors", "pt") as file:
        metadata = file.metadata()
    name = "model.layers.0.mlp.up_proj._weight_scale"
    changed = stored | {name: stored[name] * torch.inf}
    folder = replace_tensors(tmp_path / "changed", low_precision, changed)
    save_file(changed, folder / "model.safetensors", metadata=metadata)
    with pytest.raises(CheckpointError, match=r"layers.0.mlp.up_proj has a weight whose scales are not all finite"):
        load(folder)
