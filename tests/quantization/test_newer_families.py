"""Families with states, many experts or positions in their queries: the formats in which their owners quantize them."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.quantization.test_modelopt import fp8, nvfp4
from tests.quantization.test_quark import mxfp4
from tests.support import parity
from tests.support.block_checkpoints import FP8, quantize_fp8
from tests.support.compressed_checkpoints import config_of, encoded_by, scheme_of, write_stored
from tests.support.parity import FAMILIES
from tests.support.quantized_models import load, logits
from tests.support.quick_rows import quick_rows

IDS = [1, 5, 9, 120, 33, 44, 45, 7, 99, 98, 97]
BY_NAME = {family.name: family for family in FAMILIES}


def folder_of(name, **changes):
    return Path(parity.checkpoint_folder(dataclasses.replace(BY_NAME[name], config=BY_NAME[name].config | changes)))


def fp8_blocks(_, weight):
    value, scale = quantize_fp8(weight, (32, 32))
    wide = value.float() * scale.repeat_interleave(32, 0)[: len(weight)].repeat_interleave(32, 1)[:, : weight.shape[1]]
    return {"weight": value, "weight_scale_inv": scale}, wide


def fp8_static(_, weight):
    scale = weight.abs().max() / 448
    value = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": value, "weight_scale_inv": scale, "activation_scale": torch.tensor(0.02)}, value.float() * scale


def fp8_blocks_and_table(name, weight):
    """Rows of the table of n-grams stand for themselves: their factor is 1."""
    if ".ngram_embedding." not in name:
        return fp8_blocks(name, weight)
    value = weight.to(torch.float8_e4m3fn)
    return {"weight": value}, value.float()


def deepseek_v4(module, weight):
    """fp8 in blocks, and experts in MXFP4, with scales that are powers of two."""
    if ".experts." in module:
        found, wide = mxfp4(weight)
        return {"weight": found["weight"].view(torch.int8), "scale": found["weight_scale"]}, wide
    _, scale = quantize_fp8(weight, (32, 32))
    scale = torch.exp2(scale.log2().ceil()).to(torch.float8_e8m0fnu)
    spread = scale.float().repeat_interleave(32, 0)[: len(weight)].repeat_interleave(32, 1)[:, : weight.shape[1]]
    value = (weight / spread).to(torch.float8_e4m3fn)
    return {"weight": value, "scale": scale}, value.float() * spread


INT4 = scheme_of(
    "pack-quantized", {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
)
MODELOPT = {"quant_method": "modelopt", "ignore": ["lm_head", "*.gate", "*.conv1d"]}
# The family, changes of its sizes, the matrices that its owner quantizes, how, and what config.json says.
OWNERS = {
    "Qwen3.5 FP8": (
        ("Qwen3.5", {}),
        r"(_proj|in_proj_qkv|in_proj_z)\.weight$",
        fp8_blocks,
        FP8 | {"weight_block_size": [32, 32], "modules_to_not_convert": ["lm_head", "in_proj_a", "in_proj_b"]},
    ),
    "Qwen3.5 FP8, all of the delta net": (
        ("Qwen3.5", {}),
        r"(_proj|in_proj_qkv|in_proj_[zab])\.weight$",
        fp8_blocks,
        FP8 | {"weight_block_size": [32, 32], "modules_to_not_convert": ["lm_head"]},
    ),
    "Qwen3.8-Flash-Next FP8": (
        ("Qwen3.8-Flash-Next", {}),
        r"(_proj|in_proj_qkv|in_proj_z|shard_\d)\.weight$",
        fp8_blocks_and_table,
        FP8
        | {
            "weight_block_size": [32, 32],
            "weight_per_tensor": False,
            "act_per_tensor": False,
            "modules_to_not_convert": ["lm_head", "in_proj_a", "in_proj_b"],
            "modules_to_convert": ["ple.ple_embedding.ngram_embedding"],
        },
    ),
    "MiniMax M2 FP8": (
        ("MiniMax M2", {}),
        r"(_proj|\.w[123])\.weight$",
        fp8_blocks,
        FP8 | {"weight_block_size": [32, 32], "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]},
    ),
    "GLM-5.3-Flash FP8": (
        ("GLM-5.3-Flash", {}),
        r"(attn\.([qkvo]|(q|f|g)_[ab]|kv_b)_proj|mlp\..*_proj|wq_b|wk)\.weight$",
        fp8_blocks,
        FP8
        | {
            "weight_block_size": [32, 32],
            "modules_to_not_convert": ["lm_head", "gate", "weights_proj", "self_attn.b_proj"],
        },
    ),
    "DeepSeek V4": (
        ("DeepSeek V4", {"moe_intermediate_size": 64}),
        r"(attn\.w[a-z]*_?[ab]?|indexer\.wq_b|experts\.(\d+\.)?w[123])\.weight$",
        deepseek_v4,
        FP8 | {"weight_block_size": [32, 32], "scale_fmt": "ue8m0", "modules_to_not_convert": None},
    ),
    "Ministral 3 FP8": (
        ("Ministral 3", {}),
        r"_proj\.weight$",
        fp8_static,
        {
            "quant_method": "fp8",
            "activation_scheme": "static",
            "weight_block_size": None,
            "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
        },
    ),
    "Nemotron 3 FP8": (
        ("Nemotron 3", {}),
        r"mixer\..*_proj\.weight$",
        lambda _, weight: fp8(weight),
        MODELOPT | {"quant_algo": "FP8"},
    ),
    "Nemotron 3 NVFP4": (
        ("Nemotron 3", {"moe_intermediate_size": 48}),
        r"mixer\..*_proj\.weight$",
        lambda _, weight: nvfp4(weight),
        MODELOPT | {"quant_algo": "NVFP4"},
    ),
    "Kimi K2.5 INT4": (
        ("Kimi K2", {"moe_intermediate_size": 64}),
        r"mlp\.experts\.\d+\..*_proj\.weight$",
        encoded_by(INT4),
        config_of(
            INT4,
            ignore=("lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"),
        ),
    ),
}


# Others have parts of these.
SLOW = {
    "DeepSeek V4",
    "Kimi K2.5 INT4",
    "MiniMax M2 FP8",
    "Nemotron 3 FP8",
    "Qwen3.5 FP8, all of the delta net",
    "Qwen3.8-Flash-Next FP8",
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", quick_rows(OWNERS, OWNERS.keys() - SLOW))
def test_an_owners_format_gives_the_logits_of_the_weights_it_stands_for(name, tmp_path):
    (family, changes), layers, encode, config = OWNERS[name]
    stored, wide = write_stored(tmp_path, folder_of(family, **changes), encode, config, layers=layers)
    expected = logits(load(wide), IDS)
    for native in (False, True):
        np.testing.assert_allclose(
            logits(load(stored, native=native), IDS), expected, rtol=0, atol=1e-5 * np.abs(expected).max()
        )
