"""Families with states, many experts or positions in their queries: the formats in which their owners quantize them."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from jaxis.config.hf_config import HFConfig
from jaxis.errors import ConfigError
from jaxis.quantization.checkpoint_formats import quantization_of_checkpoint
from tests.quantization.test_modelopt import fp8, mxfp8, nvfp4
from tests.quantization.test_quark import mxfp4
from tests.support import parity
from tests.support.block_checkpoints import FP8, quantize_fp8
from tests.support.compressed_checkpoints import config_of, encoded_by, scheme_of, write_stored
from tests.support.dspark import WholeBlocks, write_dspark_checkpoint
from tests.support.parity import FAMILIES
from tests.support.prediction_checkpoints import WholeDrafts
from tests.support.quantized_models import load, logits
from tests.support.quick_rows import quick_rows
from tests.support.stream_predictions import write_streams_checkpoint

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


def fp8_scale(weight):
    """fp8 in blocks, whose scales are powers of two."""
    _, scale = quantize_fp8(weight, (32, 32))
    scale = torch.exp2(scale.log2().ceil()).to(torch.float8_e8m0fnu)
    spread = scale.float().repeat_interleave(32, 0)[: len(weight)].repeat_interleave(32, 1)[:, : weight.shape[1]]
    value = (weight / spread).to(torch.float8_e4m3fn)
    return {"weight": value, "scale": scale}, value.float() * spread


def deepseek_v4(module, weight):
    """fp8 in blocks, and experts in MXFP4, with scales that are powers of two."""
    if ".experts." not in module:
        return fp8_scale(weight)
    found, wide = mxfp4(weight)
    return {"weight": found["weight"].view(torch.int8), "scale": found["weight_scale"]}, wide


def modelopt_nvfp4(weight, scale_2=None):
    tensors, wide = nvfp4(weight, scale_2)
    return tensors | {"input_scale": torch.tensor(1.0)}, wide


def with_nvfp4_experts(encode):
    """As ModelOpt converts a published file: its experts to NVFP4, all else as it was."""
    return lambda module, weight: modelopt_nvfp4(weight) if ".experts." in module else encode(weight)


def minimax_mxfp8(weight):
    tensors, wide = mxfp8(weight)
    return {"weight": tensors["weight"], "weight_scale_inv": tensors["weight_scale"]}, wide


def nvfp4_and_table(module, weight):
    """Experts and the table of n-grams in NVFP4, other matrices in MXFP8."""
    if ".ngram_embedding." in module:
        return nvfp4(weight, 2.0**-14)  # one factor for all shards
    return with_nvfp4_experts(mxfp8)(module, weight)


def deepseek_v41(module, weight):
    """As V4's; rows of the tables of n-grams are fp8 with a scale for each 32 elements."""
    if not module.endswith("engram.embed"):
        return deepseek_v4(module, weight)
    groups = weight.unflatten(-1, (-1, 32))
    scale = torch.exp2((groups.abs().amax(-1) / 448).log2().ceil()).to(torch.float8_e8m0fnu)
    value = (groups / scale.float()[..., None]).to(torch.float8_e4m3fn)
    wide = (value.float() * scale.float()[..., None]).flatten(-2)
    return {"weight": value.flatten(-2), "scale": scale}, wide


INT4 = scheme_of(
    "pack-quantized", {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
)
NVFP4 = scheme_of("nvfp4-pack-quantized", "NVFP4A16")
MXFP4 = scheme_of(
    "mxfp4-pack-quantized",
    {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
    | {"scale_dtype": torch.uint8, "observer": "minmax"},
)
FP8_BLOCKS = scheme_of(
    "float-quantized",
    {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "block", "block_structure": [32, 32]},
)


def nvfp4_of_experts(layers, module):
    return {module.format(layer): {"quant_algo": "NVFP4", "group_size": 16} for layer in layers}


MINIMAX_M3 = {"intermediate_size": 64, "dense_intermediate_size": 96, "shared_intermediate_size": 64}
MINIMAX_M3_LAYERS = r"(_proj|\.w[123])\.weight$"
MINIMAX_M3_LEFT = [
    *("lm_head", "model.embed_tokens", "vision_tower", "multi_modal_projector", "patch_merge_mlp"),
    *(f"language_model.model.layers.{layer}.block_sparse_moe.gate" for layer in (1, 2)),
]
DEEPSEEK_V4_LAYERS = r"(attn\.w[a-z]*_?[ab]?|indexer\.wq_b|experts\.(\d+\.)?w[123])\.weight$"
DEEPSEEK_V4_FP8 = FP8 | {"weight_block_size": [32, 32], "scale_fmt": "ue8m0"}
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
        DEEPSEEK_V4_LAYERS,
        deepseek_v4,
        DEEPSEEK_V4_FP8 | {"modules_to_not_convert": None},
    ),
    "DeepSeek V4 NVFP4 by ModelOpt": (
        ("DeepSeek V4", {"moe_intermediate_size": 64}),
        DEEPSEEK_V4_LAYERS,
        with_nvfp4_experts(fp8_scale),
        DEEPSEEK_V4_FP8
        | {
            **{"quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4", "group_size": 16, "expert_dtype": "fp4"},
            **{"kv_cache_quant_algo": None, "producer": {"name": "modelopt", "version": "dsv4-nvfp4-experts"}},
            "ignore": ["*.attn.*", "*.ffn.shared_experts.*", "head", "mtp.*"],
            "quantized_layers": nvfp4_of_experts(range(4), "layers.{}.ffn.experts"),
        },
    ),
    "DeepSeek V4 NVFP4 by llm-compressor": (
        ("DeepSeek V4", {"moe_intermediate_size": 64}),
        r"(attn\.(wq_a|wkv|wq_b|wo_a|wo_b)|indexer\.wq_b|experts\.\d+\.w[123])\.weight$",
        lambda module, weight: encoded_by(FP8_BLOCKS if ".attn." in module else NVFP4)(module, weight),
        config_of(
            FP8_BLOCKS.model_copy(update={"targets": ["re:.*attn.*(fused_wqa_wkv|wq_b|wo_a|wo_b)$"]}),
            NVFP4.model_copy(update={"targets": ["re:.*ffn.*(gate|up|down)_proj$"]}),
            ignore=(),
        ),
    ),
    "MiniMax M3 MXFP8": (
        ("MiniMax M3", MINIMAX_M3),
        MINIMAX_M3_LAYERS,
        lambda _, weight: minimax_mxfp8(weight),
        {"quant_method": "mxfp8", "activation_scheme": "dynamic", "weight_block_size": [1, 32]}
        | {"ignored_layers": MINIMAX_M3_LEFT},
    ),
    "MiniMax M3 NVFP4": (
        ("MiniMax M3", MINIMAX_M3),
        MINIMAX_M3_LAYERS,
        with_nvfp4_experts(minimax_mxfp8),
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "exclude_modules": MINIMAX_M3_LEFT}
        | {
            "kv_cache_quant_algo": None,
            "quantized_layers": {
                **{
                    f"language_model.model.layers.{layer}.{module}": {"quant_algo": "MXFP8"}
                    for layer in range(3)
                    for module in (
                        *(f"self_attn.{part}_proj" for part in ("q", "k", "v", "o", "index_q", "index_k")),
                        *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
                        *(f"block_sparse_moe.shared_experts.{part}_proj" for part in ("gate", "up", "down")),
                    )
                },
                **{
                    f"language_model.model.layers.{layer}.block_sparse_moe.experts.{expert}.w{part}": {
                        **{"quant_algo": "NVFP4", "group_size": 16}
                    }
                    for layer in (1, 2)
                    for expert in range(8)
                    for part in (1, 2, 3)
                },
            },
        },
    ),
    "MiniMax M3.1": (
        ("MiniMax M3", MINIMAX_M3),
        MINIMAX_M3_LAYERS,
        lambda module, weight: encoded_by(NVFP4)(module, weight) if ".experts." in module else minimax_mxfp8(weight),
        {"quant_method": "mxfp8", "weight_block_size": [1, 32], "ignored_layers": MINIMAX_M3_LEFT}
        | {"moe_quant_algo": "NVFP4", "moe_quant_format": "nvfp4-pack-quantized"},
    ),
    "Kimi K3 MXFP4": (
        ("Kimi K3", {"moe_intermediate_size": 64}),
        r"block_sparse_moe\.experts\.\d+\.w[123]\.weight$",
        encoded_by(MXFP4),
        config_of(
            MXFP4,
            ignore=(
                *("re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"),
                *("re:.*lm_head.*", "re:.*vision_tower.*", "re:.*mm_projector.*"),
            ),
        ),
    ),
    "Qwen3.8-Flash-Next NVFP4": (
        ("Qwen3.8-Flash-Next", {"moe_intermediate_size": 48}),
        r"(mlp\.experts\..*_proj|shard_\d)\.weight$",
        lambda module, weight: fp8_blocks_and_table(module, weight) if ".ple." in module else modelopt_nvfp4(weight),
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
        | {
            "ignore": [
                *("model.embed_tokens", "mtp.*", "model.mtp.*", "*.self_attn.*", "*.linear_attn.*", "*.mlp.gate*"),
                *("*.mlp.shared_expert.*", "*.mlp.shared_expert_gate*", "*hyper_connection*", "*.ple.*"),
                *("model.visual.*", "model.language_model.embed_tokens", "lm_head"),
            ]
        },
    ),
    "Qwen3.8-Flash-Next NVFP4, its table too": (
        ("Qwen3.8-Flash-Next", {"moe_intermediate_size": 48, "ple_embed_dim": 64, "ple_embedding_dtype": "nvfp4"}),
        r"(mlp\.experts\..*_proj|linear_attn\.in_proj_(qkv|z)|shard_\d)\.weight$",
        nvfp4_and_table,
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "ignore": ["lm_head", "model.visual*"]}
        | {
            "quantized_layers": {
                **nvfp4_of_experts(range(3), "model.language_model.layers.{}.mlp.experts"),
                **nvfp4_of_experts((0, 2), "model.language_model.layers.{}.ple.ple_embedding.ngram_embedding"),
                "model.language_model.layers.*.linear_attn.in_proj_*": {"quant_algo": "MXFP8"},
                "mtp.layers.0.mlp.experts": {"quant_algo": "FP8_PB_WO", "group_size": 128},
            }
        },
    ),
    "DeepSeek V4.1": (
        ("DeepSeek V4.1", {"moe_intermediate_size": 64, "engram_head_dim": 64}),
        r"(attn\.w[a-z]*_?[ab]?|indexer\.wq_b|experts\.(\d+\.)?w[123]|engram\.(wkv|embed))\.weight$",
        deepseek_v41,
        FP8 | {"weight_block_size": [32, 32], "scale_fmt": "ue8m0", "expert_dtype": "fp4"},
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


REFUSED = [
    ({"quant_method": "mxfp8", "weight_block_size": [1, 16]}, "weight_block_size=\\[1, 16\\] is not supported"),
    ({"quant_method": "mxfp8", "moe_quant_algo": "MXFP4"}, "moe_quant_algo='MXFP4' is not supported"),
    (FP8 | {"moe_quant_algo": "NVFP4", "group_size": 32}, "group_size=32 is not supported; supported: 16"),
    (FP8 | {"quantized_layers": {}}, "has the key 'quantized_layers', which is not supported"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_other_settings_of_experts_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        quantization_of_checkpoint(HFConfig({"quantization_config": settings}), None)


# Others have parts of these.
SLOW = {
    "DeepSeek V4",
    "DeepSeek V4 NVFP4 by llm-compressor",
    "DeepSeek V4.1",
    "Kimi K2.5 INT4",
    "MiniMax M2 FP8",
    "MiniMax M3 MXFP8",
    "MiniMax M3.1",
    "Nemotron 3 FP8",
    "Qwen3.5 FP8, all of the delta net",
    "Qwen3.8-Flash-Next FP8",
    "Qwen3.8-Flash-Next NVFP4",
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


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["DeepSeek V4", "Qwen3.8-Flash-Next FP8", "GLM-5.3-Flash FP8", "DeepSeek V4.1"])
def test_a_prediction_layer_in_an_owners_format_drafts_by_the_weights_it_stands_for(name, tmp_path):
    (family, changes), layers, encode, config = OWNERS[name]
    is_dspark = family == "DeepSeek V4.1"
    write, drafts_of = (write_dspark_checkpoint, WholeBlocks) if is_dspark else (write_streams_checkpoint, WholeDrafts)
    source = write(tmp_path, family, **changes)
    layers = rf"{layers}|mtp\.(0\.([eh]|main)_proj|fc_\w+)\.weight$"
    stored, wide = write_stored(tmp_path, source, encode, config, layers=layers)
    _, expected = drafts_of(load(wide, prediction_layer=True))(IDS, 2)
    for native in (False, True):
        _, found = drafts_of(load(stored, native=native, prediction_layer=True))(IDS, 2)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
