"""Checkpoints quantized by bitsandbytes, end to end."""

import re

import numpy as np
import pytest
from safetensors.torch import load_file

from jaxis.errors import CheckpointError, ConfigError
from jaxis.kernels.weights import CodedWeight, QuantizedWeight
from tests.quantization.foreign_quantizers import bitsandbytes_4bit, bitsandbytes_8bit, write_quantized
from tests.support.block_checkpoints import assert_logits, replace_tensors
from tests.support.dequantized import dequantize
from tests.support.quantized_models import assert_equal, load, values
from tests.support.tiny_checkpoints import variant, write_checkpoint

CONFIG_4 = {
    "_load_in_4bit": True,
    "_load_in_8bit": False,
    "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_quant_storage": "uint8",
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "llm_int8_enable_fp32_cpu_offload": False,
    "llm_int8_has_fp16_weight": False,
    "llm_int8_skip_modules": ["lm_head", "q_proj"],  # wrong, as it often is
    "llm_int8_threshold": 6.0,
    "load_in_4bit": True,
    "load_in_8bit": False,
    "quant_method": "bitsandbytes",
}
CONFIG_8 = {"load_in_8bit": True, "llm_int8_threshold": 6.0, "quant_method": "bitsandbytes"}
KINDS = {"nf4": (bitsandbytes_4bit, CONFIG_4, CodedWeight), "int8": (bitsandbytes_8bit, CONFIG_8, QuantizedWeight)}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "qwen3"
    return write_checkpoint(folder, tokenizer=False, hidden_size=96, intermediate_size=160, tie_word_embeddings=False)


@pytest.fixture(scope="module", params=KINDS)
def written(request, source, tmp_path_factory):
    quantize, config, kind = KINDS[request.param]
    return *write_quantized(tmp_path_factory.mktemp(request.param), source, quantize, config), kind


@pytest.mark.sampled
def test_logits_are_those_of_the_weights_that_the_file_stands_for(written):
    quantized, wide, _ = written
    assert_logits(quantized, wide)


@pytest.mark.sampled
def test_weights_stay_quantized(written):
    quantized, wide, kind = written
    held, expected = values(load(quantized)), load_file(wide / "model.safetensors")
    assert held.keys() == expected.keys()
    for name, weight in held.items():
        assert isinstance(weight, kind) == name.endswith("_proj.weight")
        # Of 8 bits, the last one of float32 may differ: tests/quantization/formats says why.
        np.testing.assert_allclose(dequantize(weight), expected[name].numpy(), rtol=2**-22, err_msg=name)


@pytest.fixture(scope="module")
def nf4(source, tmp_path_factory):
    """(quantized, with the weights that it stands for)"""
    return write_quantized(tmp_path_factory.mktemp("nf4"), source, bitsandbytes_4bit, CONFIG_4)


@pytest.mark.parametrize("native", [False, True])
def test_it_can_be_dequantized(nf4, native):
    quantized, wide = nf4
    assert_equal(load(quantized, "dequantize", native=native), load(wide, native=native))


def test_experts_of_which_only_some_are_quantized_are_refused(tmp_path):
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    source = write_checkpoint(tmp_path / "source", "qwen3_moe", tokenizer=False, **sizes)
    quantized, _ = write_quantized(tmp_path, source, bitsandbytes_4bit, CONFIG_4, r"[013]\.(up|gate)_proj\.weight$")
    with pytest.raises(ConfigError, match=r"experts stores gate_proj of expert 2 differently from that of expert 0"):
        load(quantized)


def test_a_file_that_asks_to_be_quantized_is_refused(source, tmp_path):
    folder = variant(tmp_path / "plain", source, quantization_config=CONFIG_4)
    message = r"to be quantized by bitsandbytes when they are loaded, which is not done: give quantization='int4'"
    for quantization in (None, "dequantize"):
        with pytest.raises(ConfigError, match=message):
            load(folder, quantization)
    assert_equal(load(folder, "int8"), load(source, "int8"))


def test_it_cannot_be_quantized_again(written):
    with pytest.raises(ConfigError, match=r"is quantized by bitsandbytes and cannot be quantized again"):
        load(written[0], "int4")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("weight.absmax", lambda _: None, r"1 of the model's parameters are not in .*: .*q_proj.weight.absmax"),
        (
            "weight.absmax",
            lambda t: t[:-1],
            r"q_proj.weight.absmax' has shape \[191\] in the checkpoint, \[192\] in the mo",
        ),
        ("weight", lambda t: t.int(), "q_proj.weight' is int32 in the checkpoint|has shape"),
        (
            "weight.nested_quant_map",
            lambda t: t / 0,
            "q_proj has a weight whose scales or levels are not all fin",
        ),
        (
            "weight.quant_state.bitsandbytes__nf4",
            lambda t: t[1:],
            "has a weight whose quant_state is not a JSON object",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(nf4, tmp_path, name, change, message):
    quantized, _ = nf4
    stored = load_file(quantized / "model.safetensors")
    full_name = f"model.layers.0.self_attn.q_proj.{name}"
    stored[full_name] = change(stored[full_name])
    changed = {n: t.clone() for n, t in stored.items() if t is not None}
    with pytest.raises(CheckpointError, match=re.compile(message)):
        load(replace_tensors(tmp_path / "changed", quantized, changed))
