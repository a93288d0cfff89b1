"""Kinds of checkpoints that are not loaded are named, with what to use instead."""

import re

import numpy as np
import pytest
from transformers.utils.quantization_config import QuantizationMethod

from jaxis.config.hf_config import HFConfig
from jaxis.errors import ConfigError
from jaxis.loading.safetensors import TensorInfo
from jaxis.quantization.arguments import parse_quantization
from jaxis.quantization.checkpoint_formats import FORMATS, QUANT_METHODS, quantization_of_checkpoint
from jaxis.quantization.unsupported_kinds import UNSUPPORTED_KINDS

ORIGINAL = "use the original checkpoint, or a GGUF, AWQ, GPTQ or fp8 one of the same model"
METHODS = [
    ("exl2", r"quantized by ExLlamaV2 \(EXL2\), which is not supported: " + ORIGINAL),
    ("exl3", r"quantized by ExLlamaV3 \(EXL3\), which is not supported: " + ORIGINAL),
    ("quip", r"quantized by QuIP#, which is not supported: " + ORIGINAL),
    ("aqlm", "quantized by AQLM, which is not supported: " + ORIGINAL),
    ("vptq", "quantized by VPTQ, which is not supported: " + ORIGINAL),
    ("spqr", "quantized by SpQR, which is not supported: " + ORIGINAL),
    ("higgs", "quantized by HIGGS, which is not supported: " + ORIGINAL),
    ("quanto", "quantized by Quanto, which is not supported: use the original checkpoint with quantization='int8'"),
    ("eetq", "quantized by EETQ, which is not supported: use the original checkpoint with quantization='int8'"),
    ("fp_quant", "quantized by FP-Quant, which is not supported: " + ORIGINAL),
    ("sinq", "quantized by SINQ, which is not supported: " + ORIGINAL),
    ("bitblas", "packed for BitBLAS, a library for GPUs, which is not supported: use one saved in the format 'gptq'"),
    ("marlin", "packed for Marlin, a kernel for GPUs, which is not supported: use one saved in the format 'gptq'"),
    ("sparseml", "stored sparsely, which is not supported: " + ORIGINAL),
    ("metal", "packed for Metal, of Apple's GPUs, which is not supported: use the original checkpoint, or an MLX one"),
    ("fouroversix", "quantized by Four Over Six, which is not supported: " + ORIGINAL),
    ("unheard-of", "quantized by unheard-of, which is not supported: use one quantized by auto-round, "),
    (None, "quantized by an unknown method, which is not supported: use one quantized by"),
]
TENSORS = [
    ("q_invperm", "quantized by ExLlamaV2"),
    ("trellis", "quantized by ExLlamaV3"),
    ("Qidxs", r"quantized by QuIP#"),
    ("codebooks", "quantized by AQLM"),
    ("centroids.weight", "quantized by VPTQ"),
    ("dense_weights", "quantized by SpQR"),
    ("tables2", "quantized by HIGGS"),
    ("weight._data", "quantized by Quanto"),
    ("weight_scales", "quantized by EETQ"),
    ("forward_hadamard_matrix", "quantized by FP-Quant"),
    ("qweight", r"packed by GPTQ or AWQ, but without the description of how, .*: download its quantize_config.json or"),
    (
        "weight_packed",
        r"packed by compressed-tensors, but without the description of how, .*: download its config.json",
    ),
]


def refusal(config, names=(), choice=None):
    tensors = {name: TensorInfo(np.dtype(np.uint8), (4, 4), 16, 0) for name in ("model.norm.weight", *names)}
    with pytest.raises(ConfigError) as error:
        quantization_of_checkpoint(HFConfig(config), parse_quantization(choice), tensors)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(("method", "message"), METHODS)
def test_methods_are_named(method, message):
    config = {"quantization_config": {"quant_method": method, "some_setting": 4}}
    for choice in (None, "int8", "dequantize"):
        assert re.search(message, refusal(config, choice=choice))


@pytest.mark.parametrize(("name", "message"), TENSORS)
def test_tensors_without_a_description_are_named(name, message):
    assert re.search(message, refusal({}, [f"model.layers.0.mlp.up_proj.{name}"]))


@pytest.mark.parametrize("name", ["embed_q.weight", "unembed_out.weight"])
def test_mlxs_own_projections_are_named(name):
    config = {"quantization": {"group_size": 64, "bits": 4}}
    message = "one of MLX's with absorbed projections of latent attention, which is not supported: use the original"
    assert re.search(message, refusal(config, [f"model.layers.0.self_attn.{name}"]))
    assert re.search(message, refusal({}, [f"model.layers.0.self_attn.{name}"]))


@pytest.mark.parametrize(
    "stored",
    [
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"quant_method": "gptq", "bits": 4, "group_size": 32},
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        {"quant_method": "mxfp4"},
    ],
    ids=lambda stored: stored["quant_method"],
)
@pytest.mark.parametrize("choice", ["int8", "none"])
def test_what_is_quantized_is_not_quantized_again(stored, choice):
    message = f"is quantized by {stored['quant_method']} and cannot be quantized again: leave quantization out"
    with pytest.raises(ConfigError, match=message):
        quantization_of_checkpoint(HFConfig({"quantization_config": stored}), parse_quantization(choice))


def test_formats_have_no_order():
    assert len(set(QUANT_METHODS)) == len(QUANT_METHODS)
    by_tensors = {each.methods[0]: each.is_quantized for each in FORMATS if each.is_quantized is not None}
    suffixes = {"bitsandbytes": "weight.SCB", "hqq": "W_q", "torchao": "_weight_qdata"}
    assert by_tensors.keys() == suffixes.keys()
    for method, suffix in suffixes.items():
        tensors = {f"model.layers.0.mlp.up_proj.{suffix}": TensorInfo(np.dtype(np.uint8), (4, 4), 16, 0)}
        assert [name for name, is_quantized in by_tensors.items() if is_quantized(tensors)] == [method]


def test_every_kind_is_tested():
    tested = {method for method, _ in METHODS}
    for kind in UNSUPPORTED_KINDS:
        assert not kind.methods or tested & set(kind.methods), kind
        assert (
            not kind.tensors
            or {end.removeprefix(".") for end in kind.tensors} & {name for name, _ in TENSORS}
            or ("MLX" in kind.what)
        )


def test_every_method_of_transformers_is_known():
    methods = {method.value for method in QuantizationMethod}
    known = {*QUANT_METHODS, *(method for kind in UNSUPPORTED_KINDS for method in kind.methods)}
    # These have no checkpoints of this form yet.
    assert methods - known <= {"gemma", "nvfp4", "mxfp8", "fbgemm_fp8", "auto-round"}
