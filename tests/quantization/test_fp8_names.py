"""fp8 with one scale a weight or row, under the names and in the shapes of the tools that write it."""

import logging
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from jaxis.config.hf_config import HFConfig
from jaxis.errors import ConfigError
from jaxis.kernels.weights import BlockScaledWeight
from jaxis.layers.weight_format import WeightSlot
from jaxis.quantization.checkpoint_formats import quantization_of_checkpoint
from tests.support.block_checkpoints import assert_logits, replace_tensors, transformers_logits
from tests.support.compressed_checkpoints import write_stored
from tests.support.dequantized import dequantize
from tests.support.quantized_models import IDS, load, logits, values
from tests.support.tiny_checkpoints import LLAMA_4_SIZES, variant, write_checkpoint

LEFT = {"modules_to_not_convert": ["lm_head", "mlp.gate"]}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", **LEFT}
FBGEMM = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, **LEFT}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    root = tmp_path_factory.mktemp("sources")
    sizes = {"hidden_size": 96, "intermediate_size": 160, "tie_word_embeddings": False}
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 72, "norm_topk_prob": True}
    return {
        "dense": write_checkpoint(root / "dense", tokenizer=False, **sizes),
        "moe": write_checkpoint(root / "moe", "qwen3_moe", tokenizer=False, **sizes, **moe),
        "llama4": write_checkpoint(root / "llama4", "llama4", tokenizer=False, **LLAMA_4_SIZES),
    }


def per_tensor(weight):
    scale = weight.abs().max() / 448
    value = (weight / scale).to(torch.float8_e4m3fn)
    return value, scale, value.float() * scale


def per_row(weight):
    scale = weight.abs().amax(-1, keepdim=True) / 448
    value = (weight / scale).to(torch.float8_e4m3fn)
    return value, scale, value.float() * scale


def as_transformers(_, weight):
    """Its finegrained fp8 without blocks; static schemes have an activation_scale as well."""
    value, scale, wide = per_tensor(weight)
    assert torch.equal(Fp8Dequantize(None)._dequantize_one(value, scale, torch.float32), wide)
    return {"weight": value, "weight_scale_inv": scale, "activation_scale": torch.tensor(0.1)}, wide


def as_mistral(_, weight):
    value, scale, wide = per_tensor(weight)
    return {"weight": value, "qscale_weight": scale, "qscale_act": torch.tensor(0.1)}, wide


def as_fbgemm(_, weight):
    value, scale, wide = per_row(weight)
    return {"weight": value, "weight_scale": scale, "input_scale_ub": torch.tensor(1200.0)}, wide


def as_vllm(_, weight):
    value, scale, wide = per_tensor(weight)
    return {"weight": value, "weight_scale": scale, "input_scale": torch.tensor(0.01)}, wide


def as_rows(_, weight):
    value, scale, wide = per_row(weight)
    return {"weight": value, "weight_scale": scale[:, 0]}, wide


@pytest.mark.sampled(6)
@pytest.mark.parametrize("family", [pytest.param("dense", marks=pytest.mark.slow), "moe"])  # "moe" contains it
@pytest.mark.parametrize(
    ("encode", "config"),
    [
        (as_transformers, FP8 | {"activation_scheme": "static", "weight_block_size": None}),
        (as_mistral, FP8),
        (as_vllm, FP8 | {"activation_scheme": "static"}),
        (as_rows, FP8),
        (as_fbgemm, FBGEMM),
    ],
)
def test_logits_are_those_of_the_weights_that_fp8_stands_for(sources, tmp_path, encode, config, family):
    stored, wide = write_stored(tmp_path, sources[family], encode, config)
    held, plain = values(assert_logits(stored, wide)), load_file(wide / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    assert isinstance(held[name], BlockScaledWeight)
    np.testing.assert_array_equal(dequantize(held[name]), plain[name].numpy())


def stacked_fbgemm(tensor):
    value, scale, wide = per_row(tensor.mT)
    return value.mT.contiguous(), scale.mT.contiguous(), wide.mT.contiguous()


def stacked_fp8(tensor):
    values_and_scales = [per_tensor(each) for each in tensor]
    value, scale, wide = (torch.stack(parts) for parts in zip(*values_and_scales, strict=True))
    return value, scale, wide


@pytest.mark.sampled
@pytest.mark.parametrize("native", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    ("encode", "shape", "config"),
    [
        (stacked_fbgemm, lambda scale: scale, FBGEMM),  # [X, 1, out]
        (stacked_fbgemm, lambda scale: scale.mT.contiguous(), FBGEMM),  # [X, out, 1]
        (stacked_fp8, lambda scale: scale, FP8),  # [X]
        (stacked_fp8, lambda scale: scale[:, None, None], FP8),  # [X, 1, 1]
    ],
)
def test_stacks_of_llama_4s_experts(sources, tmp_path, encode, shape, config, native):
    quantized, plain = {}, {}
    for name, tensor in load_file(sources["llama4"] / "model.safetensors").items():
        if re.search(r"experts\.(gate_up|down)_proj$", name):
            value, scale, plain[name] = encode(tensor)
            quantized |= {name: value, f"{name}_scale": shape(scale)}
        else:
            quantized[name] = plain[name] = tensor
    left = ["lm_head", r".*\.self_attn", r".*\.shared_expert", r".*\.feed_forward\.(gate|up|down)_proj"]
    stored = replace_tensors(
        tmp_path / "stored",
        sources["llama4"],
        quantized,
        quantization_config=config | {"modules_to_not_convert": left},
    )
    expected = transformers_logits(replace_tensors(tmp_path / "wide", sources["llama4"], plain), IDS)
    np.testing.assert_allclose(
        logits(load(stored, native=native)), expected, rtol=0, atol=1e-5 * np.abs(expected).max()
    )


def test_scales_of_activations_are_said_once_not_to_be_used(sources, tmp_path, caplog):
    stored, _ = write_stored(tmp_path, sources["dense"], as_transformers, FP8 | {"activation_scheme": "static"})
    with caplog.at_level(logging.WARNING, logger="jaxis"):
        load(stored)
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("jaxis.quantization")]
    assert lines == [
        "the checkpoint's fixed scales of activations are not used: activations are quantized dynamically or not at "
        "all, which is more accurate"
    ]


@pytest.mark.parametrize(
    ("listed", "module", "is_left"),
    [
        (["model.layers.0.self_attn.qkv_proj"], "model.layers.0.self_attn.v_proj", True),
        (["model.layers.0.self_attn.qkv_proj"], "model.layers.1.self_attn.v_proj", False),
        (["gate_up_proj"], "model.layers.0.mlp.up_proj", True),
        (["model.layers.0.mlp.gate"], "model.layers.0.mlp.gate_proj", False),
        (["language_model.model.layers.0"], "model.layers.0.mlp.up_proj", True),
        (["model.language_model.layers.0.mlp"], "model.layers.0.mlp.up_proj", True),
        (["model.layers.0.mlp"], "language_model.model.layers.0.mlp.up_proj", True),
        (["re:.*self_attn.*"], "model.layers.0.self_attn.q_proj", True),  # AutoFP8's
        ([r"^(?!.*language_model).*"], "language_model.model.layers.0.mlp.up_proj", False),
        ([r"^(?!.*language_model).*"], "model.layers.0.mlp.up_proj", False),
    ],
)
def test_lists_of_modules(listed, module, is_left):
    layer = type("Layer", (), {"weight_slots": (WeightSlot("weight", (8, 8), (None, None)),)})
    config = quantization_of_checkpoint(
        HFConfig({"quantization_config": FP8 | {"modules_to_not_convert": listed}}), None
    )
    config._layers = (layer,)
    assert (config.get_quant_method(layer(), module) is None) == is_left


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"activation_scheme": "per_row"}, "activation_scheme='per_row' is not supported; supported: 'dynamic'"),
        ({"fmt": "e5m2"}, "fmt='e5m2' is not supported; supported: 'e4m3'"),
        ({"weights": 1}, "has the key 'weights', which is not supported"),
        ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert='lm_head' must be a list of names"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(keys, message):
    with pytest.raises(ConfigError, match=message) as caught:
        quantization_of_checkpoint(HFConfig({"quantization_config": FP8 | keys}), None)
    assert "\n" not in str(caught.value)


def test_fbgemms_bound_of_activations_is_accepted(sources, tmp_path):
    stored, _ = write_stored(tmp_path, sources["dense"], as_fbgemm, FBGEMM)
    other = variant(tmp_path / "other", stored, quantization_config=FBGEMM | {"activation_scale_ub": 1.0})
    np.testing.assert_array_equal(logits(load(other)), logits(load(stored)))
