"""Checkpoints quantized by AutoRound, in the formats of GPTQ and AWQ."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from jaxis.config.hf_config import HFConfig
from jaxis.errors import ConfigError
from jaxis.quantization.checkpoint_formats import quantization_of_checkpoint
from tests.quantization.packed_integers import awq_gemm_tensors, gptq_tensors, quantize, write
from tests.support.block_checkpoints import replace_tensors, transformers_logits
from tests.support.quantized_models import IDS, load, logits
from tests.support.quick_rows import quick_rows
from tests.support.tiny_checkpoints import write_checkpoint

AUTO_ROUND = {
    "quant_method": "auto-round",
    "packing_format": "auto_round:auto_gptq",
    "bits": 4,
    "group_size": 32,
    "sym": True,
    "data_type": "int",
    "act_bits": 16,
    "act_data_type": "float",
    "autoround_version": "0.9.0",
    "batch_size": 8,
    "block_name_to_quantize": "model.layers",
    "enable_minmax_tuning": True,
    "iters": 200,
    "lr": 0.005,
    "low_gpu_mem_usage": True,
    "nsamples": 128,
    "scale_dtype": "torch.float16",
    "seqlen": 2048,
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "qwen3"
    return write_checkpoint(folder, tokenizer=False, tie_word_embeddings=False)


def assert_logits(folder, wide):
    expected = transformers_logits(wide, IDS)
    for native in (False, True):
        actual = logits(load(folder, native=native))
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def packs(tensors, **how):
    def pack(module, weight):
        if not module.endswith("_proj"):
            return None
        integers = quantize(weight, **how)
        return tensors(integers), integers.wide

    return pack


def version_2(integers):
    return gptq_tensors(integers, version=2, has_order=False)


# What config.json says, the function that writes the tensors, and whether they are symmetric.
PACKINGS = [
    ({}, gptq_tensors, True),
    ({"sym": False}, gptq_tensors, False),
    ({"packing_format": "auto_round:gptq"}, version_2, True),
    ({"packing_format": "auto_round:gptq"}, gptq_tensors, True),
    ({"packing_format": "auto_round", "sym": False}, version_2, False),
    ({"packing_format": "auto_round:gptqmodel", "sym": False}, version_2, False),
    ({"packing_format": "auto_round:auto_awq", "sym": False}, awq_gemm_tensors, False),
    ({"packing_format": "auto_round:awq"}, awq_gemm_tensors, True),
    ({"packing_format": None, "backend": "auto_round:exllamav2"}, version_2, True),
    ({"packing_format": None, "backend": "auto"}, gptq_tensors, True),
    ({"quant_method": "intel/auto-round"}, gptq_tensors, True),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("config", "tensors", "symmetric"), quick_rows(PACKINGS, [PACKINGS[i] for i in (1, 4, 7, 9)]))
def test_each_packing_format(source, tmp_path, config, tensors, symmetric):
    packed, wide = write(tmp_path, source, packs(tensors, symmetric=symmetric), AUTO_ROUND | config)
    assert_logits(packed, wide)


def test_modules_with_settings_of_their_own(source, tmp_path):
    def pack(module, weight):
        if module == "lm_head":
            integers = quantize(weight, 8, -1)
        elif module.endswith("1.mlp.up_proj"):
            integers = quantize(weight, 4, symmetric=True)
        elif module.endswith("up_proj"):
            integers = quantize(weight, 8, 64, symmetric=False)
        elif not module.endswith("_proj") or module.endswith("k_proj"):
            return None
        else:
            integers = quantize(weight)
        return gptq_tensors(integers, has_order=False), integers.wide

    extra = {
        ".*up_proj": {"bits": 8, "group_size": 64, "sym": False},
        "model.layers.1.mlp.up_proj": {"bits": 4, "group_size": 32},
        "k_proj": {"bits": 16, "data_type": "float"},
        "lm_head": {"bits": 8, "group_size": -1, "sym": True, "data_type": "int", "act_bits": 16},
    }
    packed, wide = write(tmp_path, source, pack, AUTO_ROUND | {"extra_config": extra})
    assert_logits(packed, wide)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def float_tensors(kind, weight):
    """The tensors that stand for about this weight, and what they stand for; activations' scales are not used."""
    n, k = weight.shape
    if kind == "fp8":
        scale = np.abs(weight).max(1) / 448
        value = torch.from_numpy(weight / scale[:, None]).to(torch.float8_e4m3fn)
        stored = {"weight": value, "weight_scale": torch.from_numpy(scale).bfloat16(), "input_scale": torch.ones(1)}
        return stored, value.float() * stored["weight_scale"].float()[:, None]
    if kind == "fp8 blocks":
        scale = torch.rand(n // 32, k // 32) / 100
        value = torch.from_numpy(weight * 50).to(torch.float8_e4m3fn)
        wide = scale.repeat_interleave(32, 0).repeat_interleave(32, 1)
        return {"weight": value, "weight_scale_inv": scale}, value.float() * wide
    codes = np.random.default_rng(n).integers(0, 16, (n, k)).astype(np.uint8)
    packed = torch.from_numpy(codes[:, ::2] | codes[:, 1::2] << 4)
    if kind == "nv_fp4":
        scale = torch.rand(n, k // 16).mul(100).to(torch.float8_e4m3fn)
        stored = {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": torch.tensor([2048.0])}
        stored["input_global_scale"] = torch.tensor([3.0])
        return stored, torch.from_numpy(E2M1[codes]) * scale.float().repeat_interleave(16, 1) / 2048
    exponents = torch.randint(118, 124, (n, k // 32), dtype=torch.uint8)
    scale = torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)
    if kind == "mx_fp4":
        return {"weight_packed": packed, "weight_scale": exponents}, torch.from_numpy(E2M1[codes]) * scale
    value = torch.from_numpy(weight).to(torch.float8_e4m3fn)
    return {"weight": value, "weight_scale": exponents}, value.float() * scale


# What the tensors are, and what config.json says.
FLOATS = [
    ("fp8", {"packing_format": "auto_round:fp8_static", "data_type": "fp", "bits": 8, "group_size": -1}),
    ("fp8 blocks", {"packing_format": "auto_round:fp8", "data_type": "fp", "bits": 8, "group_size": [32, 32]}),
    ("fp8 blocks", {"packing_format": "auto_round:fp8", "data_type": "fp", "weight_block_size": [32, 32]}),
    ("nv_fp4", {"packing_format": "auto_round:llm_compressor", "data_type": "nv_fp4_with_static_gs"}),
    ("mx_fp4", {"packing_format": "auto_round:llm_compressor", "data_type": "mx_fp"}),
    ("mx_fp8", {"packing_format": "auto_round:llm_compressor", "data_type": "mx_fp8e4m3", "bits": 8}),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("kind", "config"), quick_rows(FLOATS, [FLOATS[i] for i in (0, 2, 3)]))
def test_floats_are_as_their_tensors_say(source, tmp_path, kind, config):
    torch.manual_seed(0)
    quantized, wide = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        quantized[name] = wide[name] = tensor
        if name.endswith("_proj.weight"):
            del quantized[name]
            stored, wide[name] = float_tensors(kind, tensor.float().numpy())
            quantized |= {name.removesuffix("weight") + key: each for key, each in stored.items()}
    config = AUTO_ROUND | {"act_bits": 8 if kind == "fp8" else 4, "group_size": 32} | config
    folder = replace_tensors(tmp_path / "quantized", source, quantized, quantization_config=config)
    assert_logits(folder, replace_tensors(tmp_path / "wide", source, wide))
    if kind == "fp8 blocks":
        without = {**config, "group_size": 32, "weight_block_size": None}
        folder = replace_tensors(tmp_path / "without", source, quantized, quantization_config=without)
        with pytest.raises(ConfigError, match=r"has no weight_block_size, and model.layers.0.* is stored in blocks"):
            load(folder)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"packing_format": "auto_round:llm_compressor", "data_type": "nvfp4_v2"},
            "with data_type='nvfp4_v2' and sym=True is not supported: use a checkpoint that AutoRound exported as",
        ),
        ({"packing_format": "mlx"}, "packing_format='mlx' with"),
        ({"packing_format": ["x"]}, r"packing_format=\['x'\] with"),
        ({"packing_format": None, "backend": "auto_round:tritonv2", "sym": False}, "and sym=False is not supported"),
        ({"act_bits": 8}, "act_bits=8 is not supported; supported: 16"),
        ({"rotation_config": {"type": "hadamard"}}, "rotation_config=.* is not supported; supported: None"),
        ({"bits": 6}, "bits=6 is not supported"),
        ({"extra_config": [1]}, r"extra_config=\[1\] must be an object"),
        ({"extra_config": {"a": 1}}, "extra_config: a is 1, expected an object"),
        ({"extra_config": {"a": {"data_type": "mx_fp"}}}, "extra_config: a: data_type='mx_fp' is not supported"),
        ({"extra_config": {"(": {"bits": 4}}}, "is not a regular expression"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(config, message):
    with pytest.raises(ConfigError, match=message):
        quantization_of_checkpoint(HFConfig({"quantization_config": AUTO_ROUND | config}), None)
