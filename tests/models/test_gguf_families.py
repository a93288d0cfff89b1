"""Every family in GGUF: the file gives transformers' logits of the checkpoint that it was made of."""

import dataclasses
import itertools
import re
from pathlib import Path

import gguf
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from flax import nnx
from transformers import AutoModelForCausalLM

from jaxis.bringup.convert.from_gguf import convert_from_gguf
from jaxis.bringup.verify.compare import GATES, relative_error
from jaxis.config import ModelConfig, VllmConfig
from jaxis.loading.open_checkpoint import read_hf_config
from jaxis.models.model_loader import load_model
from jaxis.parallel.mesh import make_mesh
from jaxis.quantization.checkpoint_formats import quantization_of_checkpoint
from jaxis.quantization.wrappers import Dequantize, PackingConfig
from tests.support import parity
from tests.support.gguf_blocks import random_rows
from tests.support.gguf_models import ARCHITECTURES, write_gguf
from tests.support.llama_cpp_runs import run_llama_cpp
from tests.support.parity import FAMILIES, SLOW_NAMES, Family, architecture_of
from tests.support.quick_rows import quick_rows

MAX_RELATIVE_ERROR = GATES["float32"].relative_error

# Families whose test has settings that no GGUF file can have -> those of their published models.
CHANGES = {
    "Gemma 2": {"query_pre_attn_scalar": 32, "attention_bias": False, "sliding_window": 11},
    "Gemma 3": {
        **{"query_pre_attn_scalar": 32, "attention_bias": False, "sliding_window_pattern": 6},
        "num_hidden_layers": 7,
    },
    "Cohere 2": {"num_hidden_layers": 4, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    "StarCoder2, window": {"sliding_window": None},
    "Mixtral": {"sliding_window": None},
    "GPT-OSS": {"swiglu_limit": 7.0, "swiglu_alpha": 1.702},
    "Llama 4": {
        **{"num_hidden_layers": 4, "no_rope_layer_interval": 4},
        **{"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1},
    },
    "DeepSeek V2, biases": {"attention_bias": False, "mlp_bias": False},
    "GLM-4.7 Flash": {"mlp_layer_types": ["dense", "sparse", "sparse"], "first_k_dense_replace": 1},
    "Mistral, window": {"sliding_window": None},
    # llama.cpp's latents, and heads of queries and keys, have the epsilon, too.
    "DeepSeek V3.2": {"index_head_dim": 64, "rms_norm_eps": 1e-6},
    "GLM-5.2": {"index_head_dim": 64, "rms_norm_eps": 1e-6},
    "Kimi Linear": {"linear_num_heads": 4, "rms_norm_eps": 1e-6},
    "Ling 3": {"rms_norm_eps": 1e-6, "n_shared_experts": 1},
    "Cohere 2 MoE": {"attention_bias": False},
    "Granite SWA": {"layer_rope_theta": [10000.0, 0, 10000.0]},
    "MiniCPM3": {"v_head_dim": 16, "num_hidden_layers": 2, "dim_model_base": 256},
    "Trinity": {"num_hidden_layers": 4, "global_attn_every_n_layers": 4},
    "Mellum 2": {
        "mlp_layer_types": ["sparse", "sparse", "sparse"],
        "rope_parameters": {
            "full_attention": parity.rope("yarn", factor=4.0, original_max_position_embeddings=256)["rope_parameters"],
            "sliding_attention": parity.rope()["rope_parameters"],
        },
    },
    "SmolLM3": {"no_rope_layers": [1, 1, 1, 0]},
    "Gemma": {"attention_bias": False},
    "LFM2": {"conv_bias": False},
    "OLMoE": {"norm_topk_prob": False},
    "Qwen2 MoE": {"mlp_only_layers": []},
    "dots.llm1": {"sliding_window": None},
    "ERNIE 4.5 MoE": {"moe_layer_end_index": -1, "intermediate_size": 160},
    "Hunyuan A13B": {"moe_topk": 3},
    "Phi-3.5-MoE": {
        "router_jitter_noise": 0.01,
        **parity.longrope(
            pairs=8, short_mscale=1.243163121016122, long_mscale=1.243163121016122, original_max_position_embeddings=512
        ),
    },
    "Qwen3-Next": {
        **{"mlp_only_layers": [], "num_hidden_layers": 4},
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    },
    "Jamba": {"head_dim": 16, "mamba_proj_bias": False},
    "Granite 4": {"mamba_proj_bias": False, "layer_types": ["mamba", "attention", "mamba"]},
    "Falcon-H1": {"mamba_proj_bias": False},
    "Nemotron 3": {"layers_block_type": ["mamba", "moe", "attention", "moe", "mamba"]},
    "Gemma 3n": {"vocab_size_per_layer_input": 131},
    "Gemma 4, experts, values that are keys": {"attention_bias": False},
    "LFM2 MoE": {"routed_scaling_factor": 1.0},
    "DeepSeek V4": {
        **{"head_dim": 64, "partial_rotary_factor": 0.25, "index_head_dim": 64},
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
    },
    "Qwen3.8-Flash-Next": {
        "rms_norm_eps": 1e-6,  # llama.cpp's heads of queries and keys have it, too
        **{"ple_layer_ids": [1], "ple_embed_dim": 64, "linear_value_head_dim": 16},
        **parity.rope(theta=1_000_000.0, partial_rotary_factor=0.25, mrope_section=[2, 1, 1]),
    },
    "Kimi K3": {
        "rms_norm_eps": 1e-6,  # as above
        "linear_attn_config": {
            **{"num_heads": 4, "head_dim": 24, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0},
            **{"use_full_rank_gate": True, "kda_layers": [1, 2, 4], "full_attn_layers": [3, 5]},
        },
    },
}
LEFT_OUT = {
    "Llama, dynamic rope": "llama.cpp's converter does not write it",
    "Qwen2, window layers": "llama.cpp has no window in Qwen 2",
    "Qwen3 MoE, dense layers between, biases": "llama.cpp has experts in every layer",
    "Llama 4, dense layers between, no norms": "llama.cpp has norms and temperatures by the model's size",
    "DeepSeek V3, half-split rope, biases": "llama.cpp has neither",
    "StarCoder, heads of their own": "llama.cpp's converter does not write it",
    "Granite 3, windows": "llama.cpp's Granite has none",
    "Granite 4, dense, attention alone": "llama.cpp's converter writes it as Granite 3",
    "Falcon RW": "llama.cpp's Falcon has a rope",
}

# Families whose files are loaded as another, which has the same layers with the file's projections.
LOADED_AS_ANOTHER = {"Qwen3-Next", "InternLM 2"}
# Whose file has weights that are multiplied by what the checkpoint has beside them.
MULTIPLIED = {"Falcon-H1", "Falcon-H1, norm", "Kimi K3"}


LLAMA_3_1 = Family(
    "Llama 3.1 as published",
    "LlamaConfig",
    {
        "max_position_embeddings": 16384,
        **parity.rope(
            "llama3",
            500_000.0,
            factor=32.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
    },
)
# Of architectures that FAMILIES have with other settings.
MORE = [
    LLAMA_3_1,
    Family("Mamba", "MambaConfig", {"state_size": 16, "intermediate_size": 128, "time_step_rank": 7}),
    *(
        dataclasses.replace(family, name=name, config=family.config | changes)
        for name, origin, changes in (
            (
                "Granite 4, dense",
                "Granite 4",
                {"num_local_experts": 0, "num_experts_per_tok": 0, "intermediate_size": 48, "mamba_proj_bias": False},
            ),
            (
                "Mistral 4",
                "Mistral 4",
                {
                    **{"attention_bias": False, "rms_norm_eps": 1e-6, "n_group": 1, "topk_group": 1},
                    **parity.rope(
                        "yarn",
                        factor=16.0,
                        original_max_position_embeddings=32,
                        mscale=1.0,
                        mscale_all_dim=1.0,
                        llama_4_scaling_beta=0.1,
                    ),
                },
            ),
            ("MiniMax M3", "MiniMax M3", {"shared_intermediate_size": 40}),
            (
                "GLM-5.3-Flash",
                "GLM-5.3-Flash",
                {"linear_num_heads": 4, "hc_mult": 4, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
            ),
            ("Nemotron-H", "Nemotron 3", {"layers_block_type": ["mamba", "mlp", "attention", "mamba"]}),
            (
                "Falcon-H1, norm",
                "Falcon-H1",
                {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_proj_bias": False},
            ),
        )
        for family in FAMILIES
        if family.name == origin
    ),
]
GGUF_FAMILIES = [
    dataclasses.replace(family, config=family.config | CHANGES.get(family.name, {}))
    for family in FAMILIES
    if family.name not in LEFT_OUT and architecture_of(family) in ARCHITECTURES
] + MORE
families = pytest.mark.parametrize(
    "family",
    quick_rows(GGUF_FAMILIES, [f for f in GGUF_FAMILIES if f.name not in SLOW_NAMES]),
    ids=lambda family: family.name,
)


# The same settings, with rows that blocks of 32 divide.
_OF_BLOCKS = {
    "linear_value_head_dim": 16,
    "qk_nope_head_dim": 32,
    "q_lora_rank": 32,
    "v_head_dim": 32,
    "moe_intermediate_size": 64,
    "ple_embed_dim": 128,  # of four tables
}
QUANTIZED = [
    dataclasses.replace(
        family, config=family.config | {key: n for key, n in _OF_BLOCKS.items() if key in family.config}
    )
    for family in GGUF_FAMILIES
    if family.name
    in (
        *("Llama 2", "Qwen3, tied", "Phi-4", "Gemma 3", "Mixtral", "Qwen3 MoE", "GPT-OSS", "Llama 4", "DeepSeek V3"),
        "Qwen3.5",  # blocks of 32 columns, of heads of 16 values
        *("Gemma 4, experts, values that are keys", "Granite MoE Shared", "Qwen3-Next"),
        *("Granite 4", "Falcon-H1, norm", "Jamba", "Nemotron 3"),
        *("DeepSeek V4", "Qwen3.8-Flash-Next", "GLM-5.3-Flash", "Kimi K3", "Hy4"),
        *("DeepSeek V3.2", "Trinity", "Cohere 2 MoE", "Kimi Linear", "Ling 3", "HRM-Text"),
    )
]
# Routers, which llama-quantize leaves as they are, and what is no matrix.
_NEVER_IN_BLOCKS = re.compile(r"gate_inp|\.bias$|norm\.weight$")
BLOCK_TYPES = [gguf.GGMLQuantizationType[name] for name in ("Q8_0", "Q4_0", "Q5_1", "Q4_1", "Q5_0", "MXFP4", "F16")]


def load(path, quantization=None, packs=False) -> nnx.Module:
    hf_config = read_hf_config(path)
    model_config = ModelConfig(str(path), hf_config, dtype=jnp.float32, max_model_len=1024)
    quant_config = quantization_of_checkpoint(hf_config, quantization)
    config = VllmConfig(model_config, quant_config=PackingConfig(quant_config) if packs else quant_config)
    return load_model(config, make_mesh())


# Of families that select among many tokens.
LENGTHS = dict.fromkeys(("DeepSeek V4", "Qwen3.8-Flash-Next", "GLM-5.3-Flash", "Hy4"), 150)


def logits(model, length=17):
    return parity.run_model(model, (length,))[length][0]


@pytest.mark.sampled(8)
@families
def test_parameters_equal_those_of_the_checkpoint_and_logits_transformers(family, tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(Path(parity.checkpoint_folder(family)), path)
    model, original = load(path), parity.loaded_model(family)
    if family.name not in LOADED_AS_ANOTHER | MULTIPLIED:
        expected = dict(original.named_parameters())
        assert {name for name, _ in model.named_parameters()} == expected.keys()
        for name, parameter in model.named_parameters():
            # Gemma's norms lose a bit when 1 is added and subtracted, Mamba's A where its logarithm is taken.
            np.testing.assert_allclose(parameter[...], expected[name][...], rtol=0, atol=3e-7, err_msg=name)
    length = LENGTHS.get(family.name, 17)
    assert relative_error(logits(model, length), parity.reference_run(family, length)[0]) < MAX_RELATIVE_ERROR


# Families whose tiny models have sizes that llama.cpp computes with -> the greatest error; its GELU is a table.
IN_LLAMA_CPP = {
    **dict.fromkeys(("OLMo", "MiniCPM", "ERNIE 4.5 MoE", "Granite MoE", "Granite MoE Shared", "Granite 4"), 1e-5),
    **dict.fromkeys(("Granite 4, dense", "Falcon-H1", "Falcon-H1, norm", "Jamba", "Mamba", "Nemotron 3"), 1e-5),
    **dict.fromkeys(("Nemotron-H", "Qwen2 MoE", "Llama 2", "DeepSeek V4", "GLM-5.3-Flash"), 1e-5),
    **dict.fromkeys(("Trinity", "Mellum 2", "K-EXAONE", "Hy3"), 1e-5),
    **dict.fromkeys(("Kimi Linear", "Ling 3"), 5e-5),
    **dict.fromkeys(("MiniCPM3", "Granite SWA", "Cohere 2 MoE", "HRM-Text"), 1e-5),
    **dict.fromkeys(("Qwen3.8-Flash-Next", "Kimi K3"), 5e-5),
    **dict.fromkeys(("DeepSeek V3.2", "GLM-5.2", "Mistral 4"), 1e-5),
    "Gemma 4, shared keys and values, embeddings of layers": 5e-3,
    "Gemma 4, experts, values that are keys": 5e-3,
}


# Beyond as many tokens as it selects, llama.cpp selects others than transformers.
AGREED_TOKENS = {"Qwen3.8-Flash-Next": 30}


@pytest.mark.slow  # where llama-cpp-python is installed, which the other tests do without
@pytest.mark.parametrize("name", IN_LLAMA_CPP)
def test_llama_cpp_gives_transformers_logits_of_the_file(name, tmp_path):
    """So the file is one of llama.cpp's, not only what this project takes for one."""
    family = next(family for family in GGUF_FAMILIES if family.name == name)
    length = min(LENGTHS.get(name, 17), AGREED_TOKENS.get(name, 256))
    expected = parity.reference_run(family, length)[0]
    path = tmp_path / "model.gguf"
    write_gguf(Path(parity.checkpoint_folder(family)), path, more=lambda writer: _add_tokens(writer, expected.shape[1]))
    found, _, _ = run_llama_cpp(path, parity.prompt(length))
    assert relative_error(found, expected) < IN_LLAMA_CPP[name]


def _add_tokens(writer: gguf.GGUFWriter, count: int) -> None:
    """Tokens that stand for nothing: llama.cpp needs as many as there are embeddings."""
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"t{i}" for i in range(count)])
    writer.add_token_scores([0.0] * count)
    writer.add_token_types([gguf.TokenType.NORMAL] * count)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("Granite MoE Shared", marks=pytest.mark.slow),
        "Gemma 4, experts, values that are keys",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("Apertus", "Hunyuan A13B", "Mamba2")),
    ],
)
def test_files_become_folders_as_transformers_has_them(name, tmp_path):
    family = next(family for family in GGUF_FAMILIES if family.name == name)
    write_gguf(Path(parity.checkpoint_folder(family)), tmp_path / "model.gguf")
    convert_from_gguf(tmp_path / "model.gguf", tmp_path / "back")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32).eval()
    with torch.no_grad():
        found = model(torch.tensor([parity.prompt(17)]), use_cache=False).logits[0].numpy()
    assert relative_error(found, parity.reference_run(family, 17)[0]) < MAX_RELATIVE_ERROR


CONVERTED = {
    *("DeepSeek V4", "Qwen3.8-Flash-Next", "GLM-5.3-Flash", "Kimi K3", "Hy4"),
    *("Ling 3", "Mistral 4", "HRM-Text"),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
@pytest.mark.parametrize("name", sorted(CONVERTED))
def test_files_become_folders_that_load_alike(name, dtype, tmp_path):
    family = next(family for family in GGUF_FAMILIES if family.name == name)
    write_gguf(Path(parity.checkpoint_folder(family)), tmp_path / "model.gguf")
    convert_from_gguf(tmp_path / "model.gguf", tmp_path / "back", dtype)
    expected = dict(load(tmp_path / "model.gguf").named_parameters())
    found = dict(load(tmp_path / "back").named_parameters())
    assert found.keys() == expected.keys()
    for parameter, value in expected.items():
        # Whole numbers stay as they are.
        most = (
            0.0
            if dtype == "auto" or jnp.issubdtype(value.dtype, jnp.integer)
            else 0.02 * float(jnp.abs(value[...]).max())
        )
        np.testing.assert_allclose(found[parameter][...], value[...], rtol=0, atol=most, err_msg=parameter)


@pytest.mark.sampled
@pytest.mark.parametrize("packs", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    "family",
    quick_rows(QUANTIZED, [f for f in QUANTIZED if f.name in ("Qwen3, tied", "GPT-OSS")]),
    ids=lambda family: family.name,
)
def test_blocks_give_the_logits_of_the_dequantized_weights(family, packs, tmp_path):
    """Every tensor has another type than the one before; the reference is what gguf-py dequantizes them to."""
    types = itertools.cycle(BLOCK_TYPES)
    of_one_type = r"(gate|up)_shexp|indexer\.[qk]_proj" + (r"|attn_|gate|up" if family.name == "HRM-Text" else "")
    dequantized = {}

    def quantize(name, tensor):
        if _NEVER_IN_BLOCKS.search(name) or tensor.shape[-1] % 32:
            return None
        # Of one type where they are one tensor in the checkpoint: Granite's common block, Qwen's indexer.
        kind = BLOCK_TYPES[0] if re.search(of_one_type, name) else next(types)
        rows = gguf.quants.quantize(tensor, kind)
        dequantized[name] = gguf.quants.dequantize(rows, kind)
        return rows, kind

    folder = Path(parity.checkpoint_folder(family))
    write_gguf(folder, tmp_path / "blocks.gguf", quantize=quantize)
    write_gguf(
        folder,
        tmp_path / "floats.gguf",
        quantize=lambda name, _: (dequantized[name], gguf.GGMLQuantizationType.F32) if name in dequantized else None,
    )
    expected = logits(load(tmp_path / "floats.gguf"))
    # They multiply what sums round. Kimi K3's packed blocks are 1.0e-5 from float64, the floats 1.4e-5.
    most = 3e-5 if family.name in ("Qwen3.8-Flash-Next", "Kimi K3") else 1e-5
    assert len(dequantized) >= 10
    assert relative_error(logits(load(tmp_path / "blocks.gguf", packs=packs)), expected) < most
    assert relative_error(logits(load(tmp_path / "blocks.gguf", Dequantize(), packs)), expected) < most


@pytest.mark.sampled
@pytest.mark.parametrize("packs", [False, True])
def test_blocks_of_256_and_other_types_that_gguf_py_only_reads(packs, tmp_path):
    """Random bytes are valid blocks of them."""
    family = Family("Llama", "LlamaConfig", {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64})
    types = itertools.cycle(
        ["Q4_K", "Q6_K", "Q5_K", "Q3_K", "Q2_K", "IQ4_XS", "IQ4_NL", "NVFP4", "TQ1_0", "TQ2_0", "BF16"]
    )
    dequantized = {}

    def quantize(name, tensor):
        kind = next(types)
        rows = random_rows(kind, *tensor.shape, scale=0.001) if kind != "BF16" else tensor.astype(ml_dtypes.bfloat16)
        rows = rows.view(np.uint8)
        dequantized[name] = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind])
        return rows, gguf.GGMLQuantizationType[kind]

    folder = Path(parity.checkpoint_folder(family))
    write_gguf(folder, tmp_path / "blocks.gguf", quantize=quantize)
    floats = tmp_path / "floats.gguf"
    write_gguf(folder, floats, quantize=lambda name, _: (dequantized[name], gguf.GGMLQuantizationType.F32))
    expected = logits(load(floats))
    assert np.isfinite(expected).all()
    assert relative_error(logits(load(tmp_path / "blocks.gguf", packs=packs)), expected) < 1e-5
    assert relative_error(logits(load(tmp_path / "blocks.gguf", Dequantize(), packs)), expected) < 1e-5
