"""Checkpoints quantized by bitsandbytes, end to end."""

import numpy as np
import pytest
from safetensors.torch import load_file

from jaxis.errors import ConfigError
from jaxis.kernels.weights import CodedWeight, QuantizedWeight
from tests.quantization.foreign_quantizers import bitsandbytes_4bit, bitsandbytes_8bit, write_quantized
from tests.support.block_checkpoints import assert_logits
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
    quantized, wide, kind = written
    held, expected = values(assert_logits(quantized, wide)), load_file(wide / "model.safetensors")
    assert held.keys() == expected.keys()
    for name, weight in held.items():
        assert isinstance(weight, kind) == name.endswith("_proj.weight")
        # Of 8 bits, the last one of float32 may differ: tests/quantization/formats says why.
        np.testing.assert_allclose(dequantize(weight), expected[name].numpy(), rtol=2**-22, err_msg=name)


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
