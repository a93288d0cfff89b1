"""Checkpoints quantized by AWQ: whole models, compared with transformers on the weights that they stand for."""

import numpy as np
import pytest
from safetensors.torch import load_file

from jaxis.config.hf_config import HFConfig
from jaxis.errors import CheckpointError, ConfigError
from jaxis.kernels.weights import QuantizedWeight
from jaxis.quantization.checkpoint_formats import quantization_of_checkpoint
from tests.quantization.packed_integers import awq_gemm_tensors, awq_gemv_tensors, quantize, write
from tests.support.block_checkpoints import replace_tensors, transformers_logits
from tests.support.dequantized import dequantize
from tests.support.quantized_models import IDS, assert_equal, load, logits, values
from tests.support.tiny_checkpoints import variant, write_checkpoint

AWQ = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 32,
    "version": "gemm",
    "zero_point": True,
    "modules_to_not_convert": None,
}
OLD = {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "version": "GEMM", "zero_point": True}


def pack(module, weight, tensors=awq_gemm_tensors):
    if not module.endswith("_proj"):
        return None
    integers = quantize(weight, symmetric=False)
    return tensors(integers), integers.wide


def pack_gemv(module, weight):
    return pack(module, weight, awq_gemv_tensors)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("source") / "qwen2", "qwen2", tokenizer=False)


def assert_logits(folder, wide):
    expected = transformers_logits(wide, IDS)
    for native in (False, True):
        actual = logits(load(folder, native=native))
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("config", "pack"),
    [
        (AWQ, pack),
        (OLD, pack),
        (AWQ | {"version": "gemv"}, pack_gemv),
        ({**AWQ, "version": None, "format": "gemm"}, pack),
    ],
    ids=["gemm", "old keys", "gemv", "format"],
)
def test_logits_are_those_of_the_weights_that_the_integers_stand_for(source, tmp_path, config, pack):
    packed, wide = write(tmp_path, source, pack, config)
    expected = load_file(wide / "model.safetensors")
    for name, weight in values(load(packed)).items():
        assert isinstance(weight, QuantizedWeight) == name.endswith("_proj.weight")
        np.testing.assert_array_equal(dequantize(weight), expected[name].float().numpy(), err_msg=name)
    assert_logits(packed, wide)
    assert_equal(load(packed, "dequantize", native=True), load(wide, native=True))


def test_a_gptq_config_with_the_weights_of_awq(source, tmp_path):
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "checkpoint_format": "gemm"}
    packed, wide = write(tmp_path, source, pack, config | {"desc_act": False})
    assert_logits(packed, wide)


def test_files_tell_groups_and_missing_zero_points(source, tmp_path):
    def pack(module, weight):
        if not module.endswith("up_proj"):
            return None
        integers = quantize(weight, group_size=64)
        tensors = awq_gemm_tensors(integers)
        del tensors["qzeros"]
        return tensors, integers.wide

    packed, wide = write(tmp_path, source, pack, AWQ | {"zero_point": False})
    assert_logits(packed, wide)


def test_zero_points_that_are_missing_are_named(source, tmp_path):
    packed, _ = write(tmp_path, source, pack, AWQ)
    stored = load_file(packed / "model.safetensors")
    del stored["model.layers.1.mlp.up_proj.qzeros"]
    folder = replace_tensors(tmp_path / "changed", packed, stored)
    with pytest.raises(CheckpointError, match=r"are not in the checkpoint: model.layers.1.mlp.up_proj.qzeros"):
        load(folder)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        *(
            ({"version": name}, f"version='{name}' is laid out for other kernels and is not read")
            for name in ("gemv_fast", "marlin", "exllama", "llm-awq", "ipex")
        ),
        ({"version": 4}, "version=4 is laid out for other kernels"),
        ({"bits": 8}, "bits=8 is not supported; supported: 4"),
        ({"group_size": "big"}, "group_size='big' is not supported"),
        ({"zero_point": 1}, "zero_point=1 must be true or false"),
        ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert='lm_head' must be a list of names"),
        ({"rotation": "hadamard"}, "has the key 'rotation', which is not supported"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(config, message):
    with pytest.raises(ConfigError, match=message):
        quantization_of_checkpoint(HFConfig({"quantization_config": AWQ | config}), None)


def test_config_json_alone_says_which_modules_are_quantized():
    config = AWQ | {"modules_to_not_convert": ["visual", "mlp.down"]}
    format_of = quantization_of_checkpoint(HFConfig({"quantization_config": config}), None).format_of
    assert format_of("model.layers.0.mlp.up_proj", (64, 64)).group_size == 32
    for name in ("visual.blocks.0.proj", "model.layers.0.mlp.down_proj", "lm_head", "model.embed_tokens"):
        assert format_of(name, (64, 64)) is None


def test_the_description_may_be_in_the_old_file(source, tmp_path):
    packed, wide = write(tmp_path, source, pack, AWQ)
    old = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    folder = variant(tmp_path / "old", packed, files={"quant_config.json": old}, quantization_config=None)
    assert_logits(folder, wide)
