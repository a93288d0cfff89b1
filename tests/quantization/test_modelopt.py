"""Checkpoints of NVIDIA's ModelOpt against the arithmetic of its own dequantization, in torch."""

import logging
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from jaxis.config.hf_config import HFConfig
from jaxis.errors import ConfigError
from jaxis.kernels.weights import BlockScaledWeight, CodedWeight
from jaxis.layers.weight_format import WeightSlot
from jaxis.quantization.checkpoint_formats import quantization_of_checkpoint
from tests.support.block_checkpoints import assert_logits, replace_tensors, transformers_logits
from tests.support.compressed_checkpoints import write_stored
from tests.support.dequantized import dequantize
from tests.support.quantized_models import IDS, assert_equal, load, logits, values
from tests.support.quick_rows import quick_rows
from tests.support.tiny_checkpoints import LLAMA_4_SIZES, write_checkpoint

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def nvfp4(weight, scale_2=None):
    """(Its tensors, what they stand for): scales [out, in / 16] e4m3 times one float32, amax / (6 * 448)."""
    groups = weight.float().unflatten(-1, (-1, 16))
    scale_2 = weight.abs().max().float() / (6 * 448) if scale_2 is None else torch.tensor(scale_2)
    scale = (groups.abs().amax(-1) / 6 / scale_2).to(torch.float8_e4m3fn)
    effective = scale.float() * scale_2
    magnitude = groups.abs() / torch.where(effective == 0, 1, effective)[..., None]
    code = (magnitude[..., None] - E2M1).abs().argmin(-1) | (groups < 0).int() << 3
    wide = E2M1[code & 7] * torch.where(code > 7, -1.0, 1.0) * effective[..., None]
    pairs = code.flatten(-2).unflatten(-1, (-1, 2)).to(torch.uint8)
    tensors = {"weight": pairs[..., 0] | pairs[..., 1] << 4, "weight_scale": scale, "weight_scale_2": scale_2}
    return tensors, wide.flatten(-2)


def fp8(weight):
    scale = weight.abs().max() / 448
    value = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": value, "weight_scale": scale, "input_scale": torch.tensor(0.02)}, value.float() * scale


def fp8_rows(weight):
    scale = weight.abs().amax(1) / 448
    value = (weight / scale[:, None]).to(torch.float8_e4m3fn)
    return {"weight": value, "weight_scale": scale}, value.float() * scale[:, None]


def fp8_blocks(weight):
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % 128, 0, -weight.shape[0] % 128))
    blocks = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    scale = blocks.abs().amax((1, 3), keepdim=True) / 448
    value = (blocks / scale).to(torch.float8_e4m3fn)
    rows, columns = weight.shape
    value, wide = (t.flatten(0, 1).flatten(1)[:rows, :columns].contiguous() for t in (value, value.float() * scale))
    return {"weight": value, "weight_scale": scale}, wide


def mxfp8(weight):
    groups = weight.unflatten(-1, (-1, 32))
    exponent = (groups.abs().amax(-1) / 448).log2().ceil()
    value = (groups / exponent.exp2()[..., None]).to(torch.float8_e4m3fn)
    wide = value.float() * exponent.exp2()[..., None]
    return {"weight": value.flatten(1), "weight_scale": (exponent + 127).to(torch.uint8)}, wide.flatten(1)


ALGORITHMS = {
    "FP8": fp8,
    "FP8_PER_CHANNEL_PER_TOKEN": fp8_rows,
    "FP8_PB_WO": fp8_blocks,
    "NVFP4": nvfp4,
    "W4A16_NVFP4": nvfp4,
    "MXFP8": mxfp8,
}


def config(algorithm, **keys):
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head", "*.mlp.gate"], **keys}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    root = tmp_path_factory.mktemp("sources")
    sizes = {"hidden_size": 192, "intermediate_size": 160, "tie_word_embeddings": False}
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    return {
        "dense": write_checkpoint(root / "dense", tokenizer=False, **sizes),
        "moe": write_checkpoint(root / "moe", "qwen3_moe", tokenizer=False, **sizes, **moe),
        "llama4": write_checkpoint(
            root / "llama4", "llama4", tokenizer=False, **LLAMA_4_SIZES | {"intermediate_size": 48}
        ),
    }


def assert_close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.sampled
@pytest.mark.parametrize("family", [pytest.param("dense", marks=pytest.mark.slow), "moe"])  # "moe" contains it
@pytest.mark.parametrize("algorithm", quick_rows(ALGORITHMS, ["NVFP4", "FP8"]))
def test_logits_are_those_of_the_weights_that_an_algorithm_stands_for(sources, tmp_path, algorithm, family):
    stored, wide = write_stored(
        tmp_path, sources[family], lambda _, weight: ALGORITHMS[algorithm](weight), config(algorithm)
    )
    held, expected = values(assert_logits(stored, wide)), load_file(wide / "model.safetensors")
    for name, weight in held.items():
        assert isinstance(weight, BlockScaledWeight | CodedWeight) == name.endswith(("_proj.weight", "_proj"))
        if name in expected:  # and no stack of experts
            np.testing.assert_array_equal(dequantize(weight), expected[name].numpy(), err_msg=name)
    assert_equal(load(stored, "dequantize"), load(wide))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("scale_2_shape", [(), (4,), (4, 1, 1)])
def test_stacks_of_experts_are_transposed(sources, tmp_path, scale_2_shape):
    """Stacks as ModelOpt writes those of Llama 4: [X, in / 2, out] with scales [X, in / 16, out]."""
    stored = wide = None
    quantized, plain = {}, {}
    for name, tensor in load_file(sources["llama4"] / "model.safetensors").items():
        if re.search(r"experts\.(gate_up|down)_proj$", name):
            tensors, wide = nvfp4(tensor.mT)
            quantized |= {
                name: tensors["weight"].mT.contiguous(),
                f"{name}_weight_scale": tensors["weight_scale"].mT.contiguous(),
                f"{name}_weight_scale_2": tensors["weight_scale_2"]
                .repeat(scale_2_shape or (1,))
                .reshape(scale_2_shape),
                f"{name}_input_scale": torch.tensor(0.1),
            }
            plain[name] = wide.mT.contiguous()
        else:
            quantized[name] = plain[name] = tensor
    keys = config("NVFP4", ignore=["*self_attn*", "lm_head", "*shared_expert*"])
    stored = replace_tensors(tmp_path / "stored", sources["llama4"], quantized, quantization_config=keys)
    assert_logits(stored, replace_tensors(tmp_path / "wide", sources["llama4"], plain))


def test_mixed_precision_names_an_algorithm_for_each_module(sources, tmp_path):
    def encode(module, weight):
        if module.startswith("model.layers.0.self_attn."):
            return {"weight": weight}, weight
        return nvfp4(weight) if module.endswith("down_proj") else fp8(weight)

    stored_names = [name for name in load_file(sources["dense"] / "model.safetensors") if name.endswith("_proj.weight")]
    layers = {}
    for name in stored_names:
        module = name.removesuffix(".weight")
        if module.endswith("down_proj"):
            layers[module] = {"quant_algo": "NVFP4", "group_size": 16}
        elif not module.startswith("model.layers.0.self_attn."):
            layers[module.replace("gate_proj", "gate_up_proj")] = {"quant_algo": "FP8"}
    stored, wide = write_stored(
        tmp_path,
        sources["dense"],
        encode,
        config("MIXED_PRECISION", quantized_layers=layers, quant_method="modelopt_mixed"),
    )
    assert_close(logits(load(stored)), transformers_logits(wide, IDS))


def test_scales_of_a_kv_cache_are_not_used(sources, tmp_path, caplog):
    extra = {}
    for layer in range(2):
        extra[f"model.layers.{layer}.self_attn.k_proj.k_scale"] = torch.tensor(0.5)
        extra[f"model.layers.{layer}.self_attn.v_proj.v_scale"] = torch.tensor(0.5)
    stored, wide = write_stored(
        tmp_path, sources["dense"], lambda _, weight: fp8(weight), config("FP8", kv_cache_quant_algo="FP8"), extra=extra
    )
    with caplog.at_level(logging.WARNING, logger="jaxis"):
        model = load(stored)
    assert_close(logits(model), transformers_logits(wide, IDS))
    assert sum("KV cache are not used" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("excluded", "module", "is_left"),
    [
        (["lm_head"], "lm_head", True),
        (["model.layers.1"], "model.layers.1.mlp.up_proj", True),  # a parent excludes its children
        (["model.layers.1"], "model.layers.11.mlp.up_proj", False),
        (["*.gate"], "model.layers.1.mlp.gate", True),
        (["*.gate"], "model.layers.1.mlp.gate_proj", False),
        (["model.layers.*.self_attn*"], "model.layers.1.self_attn.q_proj", True),
        (["language_model.model.layers.0"], "model.layers.0.mlp.up_proj", True),
        (["model.language_model.layers.0*"], "language_model.model.layers.0.mlp.up_proj", True),
        (["model.layers.0.self_attn.qkv_proj"], "model.layers.0.self_attn.k_proj", True),  # as engines fuse them
        (["*mlp.gate_up_proj"], "model.layers.0.mlp.up_proj", True),
        (["*mlp.gate_up_proj"], "model.layers.0.mlp.down_proj", False),
        (["*.q_proj", "*.k_proj", "*.v_proj"], "model.layers.0.self_attn.qkv_proj", True),  # fused in the file
        (["[ab].x?"], "a.x1", True),
        ([], "lm_head", False),
    ],
)
def test_wildcards_exclude_modules(excluded, module, is_left):
    layer = type("Layer", (), {"weight_slots": (WeightSlot("weight", (128, 128), (None, None)),)})()
    for key in ("ignore", "exclude_modules"):
        stored = {"quant_method": "modelopt", "quant_algo": "FP8", key: excluded}
        config = quantization_of_checkpoint(HFConfig({"quantization_config": stored}), None)
        assert (config.get_quant_method(layer, module) is None) == is_left


def test_what_hf_quant_config_says_is_understood():
    """The config as it is merged into config.json."""
    stored = {
        **{"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16},
        **{"exclude_modules": ["lm_head"], "producer": {"name": "modelopt", "version": "0.33.0"}},
    }
    hf_config = HFConfig({"quantization_config": stored})
    assert quantization_of_checkpoint(hf_config, None) is not None
    assert hf_config.unread_keys() == []


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"quant_algo": "NVFP4_AWQ"}, "quant_algo='NVFP4_AWQ' is not supported, because its weights are for scaled"),
        ({"quant_algo": "W4A16_AWQ"}, "quant_algo='W4A16_AWQ' is not supported, because its weights are for scaled"),
        ({"quant_algo": "W4A8_AWQ"}, "use a checkpoint of the same model in NVFP4 or FP8, or one that AutoAWQ wrote"),
        ({"quant_algo": "W8A8_SQ_PER_CHANNEL"}, "quant_algo='W8A8_SQ_PER_CHANNEL' is not supported; supported: FP8, "),
        ({"quant_algo": None}, "quant_algo=None is not supported; supported: FP8"),
        ({"group_size": 32}, "group_size=32 is not supported with NVFP4; supported: 16"),
        ({"pre_quant_scale": True}, "pre_quant_scale=True is not supported"),
        ({"rotation": 1}, "has the key 'rotation', which is not supported"),
        ({"ignore": "lm_head"}, "ignore='lm_head' must be a list of names"),
        ({"quant_algo": "MIXED_PRECISION"}, "quantized_layers=None must be an object that names the quantized modules"),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a.b": {"quant_algo": "INT4_AWQ"}}},
            "quantized_layers: a.b: quant_algo='INT4_AWQ' is not supported, because",
        ),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a.b": "FP8"}},
            "quantized_layers: a.b is 'FP8', expected an object",
        ),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(keys, message):
    with pytest.raises(ConfigError, match=message) as caught:
        quantization_of_checkpoint(HFConfig({"quantization_config": config("NVFP4") | keys}), None)
    assert "\n" not in str(caught.value)


def test_parts_of_a_fused_module_are_refused():
    stored = config("FP8", ignore=["*.q_proj", "*.k_proj"])
    quantization = quantization_of_checkpoint(HFConfig({"quantization_config": stored}), None)
    layer = type("Layer", (), {"weight_slots": (WeightSlot("weight", (128, 128), (None, None)),)})()
    with pytest.raises(
        ConfigError, match=r"names q_proj, k_proj of a.qkv_proj, which has q_proj, k_proj, v_proj in one"
    ):
        quantization.get_quant_method(layer, "a.qkv_proj")
