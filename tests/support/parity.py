"""Every supported family against transformers: what is compared, and how far apart it is.

`test_parity.py` holds the figures to their limits; `python tests/support/parity.py` prints them as a Markdown table.
To add a family, add a row to FAMILIES.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxis.bringup.verify.compare import relative_error
from jaxis.config import ModelConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.models.model_loader import load_model
from jaxis.parallel.mesh import make_mesh
from tests.support.paged_sequences import PagedSequence, PagedSequences

# Threads cost more than they gain on models this small.
torch.set_num_threads(1)

PROMPT_LENGTHS = (1, 17, 500)
PAGED_LENGTH = 100  # crosses many blocks and stays within every family's `max_position_embeddings`
GREEDY_TOKENS = 24  # past a prompt of 17, that is beyond every window
SINGLE_STEPS = 24  # of one token each, from the first on: two windows, several blocks
NUM_KEPT = 2  # families whose models, programs and figures are kept for the next test; tests go family by family

_SIZES = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Family:
    """One row of the table: `config` holds what it changes of the common tiny sizes.

    `architecture` is the one that jaxis is to run it by, where that is not the reference's. With `other_parts`, the
    reference is a multimodal model of which only the text part is kept: `config` is the text's.
    """

    name: str
    config_class: str
    config: dict[str, Any] = field(default_factory=dict, hash=False)
    architecture: str | None = None
    other_parts: dict[str, Any] | None = field(default=None, hash=False)


def _rope(rope_type: str = "default", theta: float = 10_000.0, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": theta, **settings}}


_YARN = _rope("yarn", 1_000_000.0, factor=4.0, original_max_position_embeddings=256)
_LLAMA31 = _rope(
    "llama3", 500_000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=128
)
_GLM_MOE = {
    **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "n_shared_experts": 2},
    **{"first_k_dense_replace": 1, "routed_scaling_factor": 1.6},
    **_rope(theta=1_000_000.0, partial_rotary_factor=0.5),
}
# Common names of a mixture of experts, and sizes that no other part of the model has.
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
_ROUTED_EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
_LOCAL_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 40}
_GEMMA4 = {
    **{"num_hidden_layers": 6, "head_dim": 16, "global_head_dim": 32, "sliding_window": 11},
    **{"final_logit_softcapping": 3.0, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2},
}
_TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"]}
_LLAMA4 = {
    **{"num_local_experts": 4, "intermediate_size_mlp": 80, "no_rope_layer_interval": 2},
    **{"attention_chunk_size": 32, "floor_scale": 16, "attn_scale": 0.3, "head_dim": 24},
}

_LATENT = {
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 40,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    # Not that of the latents' norms.
    "rms_norm_eps": 1e-3,
}
_KDA = {key: value for key, value in _LATENT.items() if key not in ("n_routed_experts", "q_lora_rank")} | {
    "num_local_experts": 8,
    "routed_scaling_factor": 1.7,
}
_SHARED_EXPERT = {
    **{"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40},
    "shared_expert_intermediate_size": 48,
}
# Key and value heads of different sizes, and three value heads to a key head.
_DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    # Of a nearly silent head, the norm would amplify the rounding of the reference, which sums by chunks.
    "rms_norm_eps": 1e-3,
    "head_dim": 32,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    **_rope(theta=1_000_000.0, partial_rotary_factor=0.25),
}
# Head and state sizes that differ, groups of several heads, a norm over each of them.
_MAMBA = {
    **{"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 24},
    **{"mamba_proj_bias": True},
}
# An encoder of images or sound, which is left out.
_TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "depth": 1}
_SEES = {"vision_config": _TOWER}
_HEARS = {
    "audio_config": {
        **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2},
        **{"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 48},
    }
}
_MROPE = _rope(partial_rotary_factor=0.5, mrope_section=[2, 3, 3])
_LFM2_VL = {"model_type": "lfm2", "block_multiple_of": 24, "layer_types": ["conv", "full_attention"]}
# Of families that have no such key, or another name for it.
_ALL_HEADS = {"num_key_value_heads": None}
_FALCON = {"num_key_value_heads": None, "intermediate_size": None}
_GPT2 = {
    **{"num_key_value_heads": None, "hidden_size": None, "num_attention_heads": None, "num_hidden_layers": None},
    **{"max_position_embeddings": None, "intermediate_size": None},
    **{"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 1024},
}
_MPT = {
    **{"num_key_value_heads": None, "hidden_size": None, "num_attention_heads": None, "num_hidden_layers": None},
    **{"max_position_embeddings": None, "intermediate_size": None},
    **{"d_model": 96, "n_heads": 6, "n_layers": 2, "max_seq_len": 1024},
}
_GROUPS = {"n_group": 4, "topk_group": 2}
_NO_GROUPS = {"n_group": 1, "topk_group": 1}
_MINICPM3 = {
    **{"num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 24},
    **{"qk_rope_head_dim": 16, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 20},
}
# Far fewer tokens than the contexts that are compared have; heads enough that no score is 0 in all of them.
_INDEXER = {"index_topk": 8, "index_n_heads": 18, "index_head_dim": 32}


def _rope_by_layer_type(full: dict[str, Any]) -> dict[str, Any]:
    return {"rope_parameters": {"full_attention": full, "sliding_attention": {"rope_type": "default"}}}


def _longrope(pairs: int, **settings: Any) -> dict[str, Any]:
    """Long frequencies for every prompt but that of one token: a paged engine cannot change sets in mid-sequence."""
    factors = {
        "short_factor": [1.0 + 0.1 * i for i in range(pairs)],
        "long_factor": [1.5 + 0.5 * i for i in range(pairs)],
    }
    return {"original_max_position_embeddings": 16, **_rope("longrope", factor=64.0, **factors, **settings)}


FAMILIES = (
    Family("Llama 2", "LlamaConfig", {"num_key_value_heads": 4, **_rope()}),
    Family("Llama 3", "LlamaConfig", _rope(theta=500_000.0)),
    Family("Llama 3.1", "LlamaConfig", {"tie_word_embeddings": True, **_LLAMA31}),
    Family("Llama, biases", "LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    Family("Llama, head_dim, one kv head", "LlamaConfig", {"head_dim": 24, "num_key_value_heads": 1}),
    Family("Llama, linear rope", "LlamaConfig", _rope("linear", factor=3.0)),
    Family("Llama, dynamic rope", "LlamaConfig", {"max_position_embeddings": 200, **_rope("dynamic", factor=2.0)}),
    Family("Llama, yarn rope", "LlamaConfig", _rope("yarn", factor=8.0, original_max_position_embeddings=64)),
    Family("Qwen2", "Qwen2Config", _rope(theta=1_000_000.0)),
    Family("MiMo", "Qwen2Config", {"head_dim": 32, **_rope(theta=640_000.0)}, architecture="MiMoForCausalLM"),
    Family("Qwen2, tied", "Qwen2Config", {"tie_word_embeddings": True}),
    Family("Qwen2.5, yarn rope", "Qwen2Config", _YARN),
    Family(
        "Qwen2, window layers",
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1},
    ),
    Family("Qwen3", "Qwen3Config", {"head_dim": 32, **_rope(theta=1_000_000.0)}),
    Family("Qwen3, tied", "Qwen3Config", {"head_dim": 32, "tie_word_embeddings": True}),
    Family("Qwen3, biases, yarn rope", "Qwen3Config", {"head_dim": 8, "attention_bias": True, **_YARN}),
    Family("Mistral, window", "MistralConfig", {"sliding_window": 13}),
    Family("Mistral", "MistralConfig", {"sliding_window": None, "head_dim": 24, **_rope(theta=1_000_000.0)}),
    Family(
        "Ministral 3",
        "Ministral3Config",
        {
            "head_dim": 24,
            **_rope(
                "yarn",
                1_000_000.0,
                factor=16.0,
                original_max_position_embeddings=16,
                mscale=1.0,
                mscale_all_dim=1.0,
                llama_4_scaling_beta=0.5,
            ),
        },
    ),
    Family(
        "Mistral 4",
        "Mistral4Config",
        {
            **_LATENT,
            **_GROUPS,
            **{"norm_topk_prob": True, "routed_scaling_factor": 1.6, "attention_bias": True, "rms_norm_eps": 1e-3},
            **_rope(
                "yarn",
                factor=16.0,
                original_max_position_embeddings=32,
                mscale=1.0,
                mscale_all_dim=1.0,
                llama_4_scaling_beta=0.5,
            ),
        },
    ),
    Family("OLMo 2", "Olmo2Config", {"attention_bias": True, **_rope(theta=500_000.0)}),
    Family(
        "OLMo 3, yarn on full layers",
        "Olmo3Config",
        {**_TWO_KINDS, "sliding_window": 11, **_rope_by_layer_type(_YARN["rope_parameters"])},
    ),
    Family(
        "Gemma 2",
        "Gemma2Config",
        {
            **{"head_dim": 32, "query_pre_attn_scalar": 20, "sliding_window": 11},
            **{"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "attention_bias": True},
        },
    ),
    Family(
        "Gemma 3",
        "Gemma3TextConfig",
        {
            **{"num_hidden_layers": 3, "head_dim": 32, "query_pre_attn_scalar": 20, "sliding_window": 11},
            **{"sliding_window_pattern": 3, "attention_bias": True, "final_logit_softcapping": 5.0},
            **_rope_by_layer_type({"rope_type": "linear", "factor": 4.0, "rope_theta": 1_000_000.0}),
        },
    ),
    Family(
        "Gemma 3n",
        "Gemma3nTextConfig",
        {
            **{"num_hidden_layers": 4, "head_dim": 16, "sliding_window": 11, "num_kv_shared_layers": 2},
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            **{"intermediate_size": [96, 80, 96, 64], "activation_sparsity_pattern": [0.9, 0.0, 0.7, 0.0]},
            **{"altup_num_inputs": 3, "altup_active_idx": 1, "laurel_rank": 12, "final_logit_softcapping": 3.0},
            # Fewer than the other embeddings.
            **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 120},
        },
    ),
    Family(
        "Gemma 4, shared keys and values, embeddings of layers",
        "Gemma4TextConfig",
        {
            **_GEMMA4,
            **{"num_kv_shared_layers": 3, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 8},
            **{"vocab_size_per_layer_input": 131, "num_key_value_heads": 1},
        },
    ),
    Family(
        "Gemma 4, experts, values that are keys",
        "Gemma4TextConfig",
        {
            **_GEMMA4,
            **{"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0},
            **{"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 40},
            **{"attention_bias": True, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
        },
    ),
    Family("Phi-3, longrope", "Phi3Config", {"sliding_window": 40, **_longrope(pairs=8)}),
    Family(
        "Phi-4-mini, partial longrope, tied",
        "Phi3Config",
        {"tie_word_embeddings": True, **_longrope(pairs=6, partial_rotary_factor=0.75)},
    ),
    Family("Phi-4", "Phi3Config", _rope(theta=250_000.0)),
    Family(
        "GLM-4-0414",
        "Glm4Config",
        {"head_dim": 32, "attention_bias": True, **_rope(partial_rotary_factor=0.5)},
    ),
    Family(
        "Granite",
        "GraniteConfig",
        {
            **{"attention_multiplier": 0.2, "embedding_multiplier": 12.0, "residual_multiplier": 0.22},
            **{"logits_scaling": 8.0, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        },
    ),
    Family("StarCoder2, window", "Starcoder2Config", {"sliding_window": 13, **_rope(theta=100_000.0)}),
    Family("Command R", "CohereConfig", {"attention_bias": True, **_rope(theta=8_000_000.0)}),
    Family("Command R+, norms on heads", "CohereConfig", {"use_qk_norm": True, "logit_scale": 0.8}),
    Family("Cohere 2", "Cohere2Config", {**_TWO_KINDS, "sliding_window": 11, "logit_scale": 0.25}),
    Family(
        "Cohere 2 MoE",
        "Cohere2MoeConfig",
        {
            **{"num_hidden_layers": 3, "sliding_window": 11, "logit_scale": 0.25, "rms_norm_eps": 1e-5},
            **{"layer_types": ["full_attention", "sliding_attention", "full_attention"], "intermediate_size": 40},
            **{"mlp_layer_types": ["dense", "sparse", "sparse"], "prefix_dense_intermediate_size": 72},
            **{"num_experts": 8, "num_experts_per_tok": 3, "num_shared_experts": 2, "expert_selection_fn": "sigmoid"},
            **{"head_dim": 32, "attention_bias": True},
        },
    ),
    Family("Mixtral", "MixtralConfig", {"num_local_experts": 6, "sliding_window": 13, **_rope(theta=1_000_000.0)}),
    Family(
        "Qwen3 MoE",
        "Qwen3MoeConfig",
        {
            **{"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "norm_topk_prob": True},
            **{"head_dim": 32, **_rope(theta=1_000_000.0)},
        },
    ),
    Family(
        "Qwen3 MoE, dense layers between, biases",
        "Qwen3MoeConfig",
        {
            **{"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "num_hidden_layers": 4},
            **{"decoder_sparse_step": 2, "mlp_only_layers": [3], "attention_bias": True, "tie_word_embeddings": True},
            **{"use_sliding_window": True, "sliding_window": 19},
        },
    ),
    Family(
        "GPT-OSS",
        "GptOssConfig",
        {
            **{"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 24, "sliding_window": 21},
            **{"swiglu_limit": 1.5, "swiglu_alpha": 1.3},
            **_rope("yarn", 150_000.0, factor=32.0, original_max_position_embeddings=32, truncate=False),
        },
    ),
    Family("Llama 4", "Llama4TextConfig", {**_LLAMA4, **_LLAMA31}),
    Family(
        "Llama 4, dense layers between, no norms",
        "Llama4TextConfig",
        {
            **_LLAMA4,
            **{"interleave_moe_layer_step": 2, "use_qk_norm": False, "attn_temperature_tuning": False},
            **{"num_experts_per_tok": 2, "attention_bias": True, "no_rope_layers": [0, 1]},
        },
    ),
    Family(
        "GLM-4.5 MoE",
        "Glm4MoeConfig",
        {**_GLM_MOE, "use_qk_norm": True, "attention_bias": True, "head_dim": 24},
    ),
    Family(
        "GLM-4.5 MoE, groups, two dense layers",
        "Glm4MoeConfig",
        {**_GLM_MOE, "num_hidden_layers": 3, "first_k_dense_replace": 2, "n_group": 4, "topk_group": 2},
    ),
    Family("Qwen3.5", "Qwen3_5TextConfig", {**_DELTA_NET, "attention_bias": True}),
    Family("Qwen3.5 MoE", "Qwen3_5MoeTextConfig", {**_DELTA_NET, **_SHARED_EXPERT, "linear_conv_kernel_dim": 3}),
    Family("Qwen3-Next", "Qwen3NextConfig", {**_DELTA_NET, **_SHARED_EXPERT, "mlp_only_layers": [1]}),
    Family(
        "DeepSeek V2 Lite",
        "DeepseekV2Config",
        {
            **_LATENT,
            "q_lora_rank": None,
            **_rope("yarn", factor=40.0, original_max_position_embeddings=64, mscale=0.707, mscale_all_dim=0.707),
        },
    ),
    Family(
        "DeepSeek V2, biases",
        "DeepseekV2Config",
        {
            **_LATENT,
            **_GROUPS,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 16.0,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    Family(
        "DeepSeek V3",
        "DeepseekV3Config",
        {
            **_LATENT,
            **_GROUPS,
            **_rope("yarn", factor=40.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=1.0),
        },
    ),
    Family(
        "DeepSeek V3, half-split rope, biases",
        "DeepseekV3Config",
        {**_LATENT, **_GROUPS, "rope_interleave": False, "attention_bias": True, "norm_topk_prob": False},
    ),
    Family(
        "Kimi K2",
        "DeepseekV3Config",
        {
            **_LATENT,
            **_NO_GROUPS,
            "n_shared_experts": 1,
            "routed_scaling_factor": 2.827,
            **_rope(
                "yarn",
                50_000.0,
                factor=32.0,
                original_max_position_embeddings=64,
                beta_fast=1.0,
                beta_slow=1.0,
                mscale=1.0,
                mscale_all_dim=1.0,
            ),
        },
    ),
    Family(
        "DeepSeek V3.2",
        "DeepseekV32Config",
        {
            **{**_LATENT, **_GROUPS, **_INDEXER, "num_hidden_layers": 2},
            **_rope("yarn", factor=40.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=1.0),
        },
    ),
    Family(
        "GLM-5.2",
        "GlmMoeDsaConfig",
        {**_LATENT, **_NO_GROUPS, **_INDEXER, "indexer_types": ["full", "shared", "full"], **_rope(theta=8_000_000.0)},
    ),
    Family(
        "GLM-4.7 Flash",
        "Glm4MoeLiteConfig",
        {
            **{key: value for key, value in _LATENT.items() if key != "first_k_dense_replace"},
            **_NO_GROUPS,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            **_rope(theta=1_000_000.0),
        },
    ),
    Family(
        "MiMo V2 Flash",
        "MiMoV2FlashConfig",
        {
            **{**_ROUTED_EXPERTS, **_GROUPS, "num_hidden_layers": 3, "head_dim": 24, "v_head_dim": 16},
            **{"num_key_value_heads": 1, "sliding_window_size": 11, "attention_bias": True, "rms_norm_eps": 1e-3},
            **{"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
            **{"mlp_layer_types": ["dense", "sparse", "sparse"], "attention_value_scale": 0.6},
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.334},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.667},
            },
        },
    ),
    Family(
        "Step 3.5",
        "Step3p7Config",
        {
            **{**_ROUTED_EXPERTS, "num_hidden_layers": 3, "head_dim": 16, "share_expert_dim": 48, "sliding_window": 11},
            **{"mlp_layer_types": ["dense", "sparse", "sparse"], "num_sliding_attention_heads": 6},
            **{"layer_types": ["full_attention", "sliding_attention", "full_attention"], "attention_bias": True},
            **{"swiglu_limits": [0, 0, 0.4], "swiglu_limits_shared": [0.5, 0, 0.3], "query_pre_attn_scalar": 20},
            **{"moe_router_scaling_factor": 1.6, "mlp_bias": True},
            "rope_parameters": {
                "full_attention": {**_LLAMA31["rope_parameters"], "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        architecture="Step3p5ForCausalLM",
        other_parts={
            "vision_config": {
                **{"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 56},
                **{"mlp_ratio": 2.0, "max_position_embeddings": 16},
            }
        },
    ),
    Family(
        "MiniMax M2",
        "MiniMaxM2Config",
        {**_LOCAL_EXPERTS, "head_dim": 32, **_rope(theta=5_000_000.0, partial_rotary_factor=0.5)},
    ),
    Family(
        "Qwen2 MoE",
        "Qwen2MoeConfig",
        {**_EXPERTS, "num_hidden_layers": 3, "mlp_only_layers": [1], "shared_expert_intermediate_size": 48},
    ),
    Family(
        "OLMoE",
        "OlmoeConfig",
        {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 40, "norm_topk_prob": True},
    ),
    Family(
        "dots.llm1",
        "Dots1Config",
        {
            **{**_ROUTED_EXPERTS, "n_shared_experts": 2},
            **{"num_hidden_layers": 3, "first_k_dense_replace": 1, "routed_scaling_factor": 1.6, **_GROUPS},
            **{"norm_topk_prob": True, "sliding_window": 19, "max_window_layers": 2},
        },
    ),
    Family(
        "ERNIE 4.5 MoE",
        "Ernie4_5_MoeConfig",
        {
            **{"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 40, "moe_num_shared_experts": 2},
            **{"num_hidden_layers": 3, "moe_layer_start_index": 1, "moe_layer_end_index": 1},
            **_rope(theta=500_000.0),
        },
    ),
    Family(
        "Granite MoE",
        "GraniteMoeConfig",
        {
            **_LOCAL_EXPERTS,
            **{"attention_multiplier": 0.2, "embedding_multiplier": 12.0, "residual_multiplier": 0.22},
            **{"logits_scaling": 8.0, "attention_bias": True, "tie_word_embeddings": True},
        },
    ),
    Family(
        "Phi-3.5-MoE",
        "PhimoeConfig",
        {
            **{"num_local_experts": 8, "intermediate_size": 40, "attention_bias": True, "lm_head_bias": True},
            # Far above the published 0.01: many experts are near each other.
            **{"router_jitter_noise": 0.3},
            **_longrope(pairs=8, short_mscale=1.2, long_mscale=1.2, original_max_position_embeddings=1024),
        },
    ),
    Family(
        "K-EXAONE",
        "ExaoneMoeConfig",
        {
            **{**_EXPERTS, **_GROUPS, "num_shared_experts": 2, "num_hidden_layers": 3, "head_dim": 24},
            **{"sliding_window": 11, "sliding_window_pattern": 2},
        },
    ),
    Family(
        "Trinity",
        "AfmoeConfig",
        {
            **{**_EXPERTS, "num_shared_experts": 2, "num_hidden_layers": 3, "head_dim": 24, "route_scale": 1.7},
            **{"sliding_window": 11, "global_attn_every_n_layers": 2, "mup_enabled": True},
        },
    ),
    Family(
        "Laguna",
        "LagunaConfig",
        {
            **{**_EXPERTS, "shared_expert_intermediate_size": 48, "num_hidden_layers": 3, "head_dim": 16},
            **{"layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 11},
            **{"num_attention_heads_per_layer": [4, 6, 4], "moe_routed_scaling_factor": 1.7},
            "moe_router_logit_softcapping": 0.8,
            "rope_parameters": {
                "full_attention": {**_YARN["rope_parameters"], "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    Family(
        "Mellum 2",
        "MellumConfig",
        {
            **{**_EXPERTS, "num_hidden_layers": 3, "head_dim": 24, "sliding_window": 11},
            **{"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
            **{"mlp_layer_types": ["sparse", "dense", "sparse"]},
            "rope_parameters": {
                "full_attention": _YARN["rope_parameters"],
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    Family(
        "Hunyuan A13B",
        "HunYuanMoEV1Config",
        {
            **{"num_experts": 8, "moe_topk": [3, 2], "intermediate_size": 40, "head_dim": 24},
            **{"attention_bias": True, "tie_word_embeddings": True, **_rope("dynamic", factor=1.0, alpha=50.0)},
        },
    ),
    Family("Hy3", "HYV3Config", {**_EXPERTS, "num_shared_experts": 2, "head_dim": 24}),
    Family(
        "SmolLM3",
        "SmolLM3Config",
        {
            **{"no_rope_layers": [1, 0], "attention_bias": True, "mlp_bias": True},
            **{"tie_word_embeddings": True, **_rope(theta=5_000_000.0)},
        },
    ),
    Family(
        "Seed-OSS",
        "SeedOssConfig",
        {"head_dim": 24, "attention_out_bias": True, "mlp_bias": True, **_rope(theta=10_000_000.0)},
    ),
    Family("EXAONE 4", "Exaone4Config", {**_TWO_KINDS, "sliding_window": 11, **_LLAMA31}),
    Family("EXAONE 4, no windows", "Exaone4Config", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    Family(
        "LFM2",
        "Lfm2Config",
        {
            **{"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "conv_bias": True},
            **{"norm_eps": 1e-3, "block_multiple_of": 24, **_rope(theta=1_000_000.0)},
        },
    ),
    Family(
        "LFM2 MoE",
        "Lfm2MoeConfig",
        {
            **_EXPERTS,
            **{"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
            **{"conv_L_cache": 4, "routed_scaling_factor": 1.6, **_rope(theta=1_000_000.0)},
        },
    ),
    Family(
        "LFM3",
        "Lfm3Config",
        {
            **{"num_hidden_layers": 5, "head_dim": 24, "sliding_window": 11, "norm_eps": 1e-3, "conv_bias": True},
            **{"attention_bias": True},
        },
    ),
    Family(
        "Nemotron 3",
        "NemotronHConfig",
        {
            **{"layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba"], "head_dim": 32},
            **{"mamba_num_heads": 6, "mamba_head_dim": 16, "ssm_state_size": 24, "n_groups": 2, **_GROUPS},
            **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "moe_latent_size": 32},
            **{"moe_shared_expert_intermediate_size": 48, "routed_scaling_factor": 1.6},
        },
    ),
    Family(
        "Granite 4",
        "GraniteMoeHybridConfig",
        {
            **{**_MAMBA, **_LOCAL_EXPERTS, "shared_intermediate_size": 48, "mamba_n_groups": 1},
            **{"num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"]},
            **{"attention_multiplier": 0.2, "embedding_multiplier": 12.0, "residual_multiplier": 0.22},
            **{"logits_scaling": 8.0, "tie_word_embeddings": True, "position_embedding_type": "nope"},
        },
    ),
    Family(
        "Granite 4, dense, attention alone",
        "GraniteMoeHybridConfig",
        {
            **{"num_local_experts": 0, "shared_intermediate_size": 48, "layer_types": ["attention"] * 2},
            **{"position_embedding_type": "rope", "residual_multiplier": 0.22, "mamba_n_heads": 8},
            **{"attention_multiplier": 0.2},
        },
    ),
    Family(
        "Falcon-H1",
        "FalconH1Config",
        {
            **{**_MAMBA, "mamba_d_ssm": 128, "mamba_n_groups": 2, "head_dim": 32, "key_multiplier": 0.4},
            **{"ssm_multipliers": [0.35, 0.25, 0.3, 0.5, 0.7], "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.6},
            **{"attention_in_multiplier": 1.1, "attention_out_multiplier": 0.94, "mlp_multipliers": [0.88, 0.59]},
            **{"embedding_multiplier": 5.7, "lm_head_multiplier": 0.04, "projectors_bias": False},
            **_rope(theta=1e11),
        },
    ),
    Family(
        "Bamba",
        "BambaConfig",
        {**_MAMBA, "num_hidden_layers": 3, "attn_layer_indices": [1], "mamba_n_groups": 2, "attention_bias": True},
    ),
    Family(
        "Jamba",
        "JambaConfig",
        {
            **{"num_hidden_layers": 3, "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 8},
            **{"num_experts_per_tok": 3, "mamba_d_state": 24, "mamba_dt_rank": 7, "mamba_proj_bias": True},
            **{"intermediate_size": 40, "head_dim": 32},
        },
    ),
    Family(
        "Falcon Mamba",
        "FalconMambaConfig",
        {"state_size": 5, "conv_kernel": 3, "time_step_rank": 7, "expand": 3, "intermediate_size": 112},
    ),
    Family(
        "Mamba2",
        "Mamba2Config",
        {"num_heads": 8, "head_dim": 16, "state_size": 24, "n_groups": 2, "conv_kernel": 3, "use_bias": True},
    ),
    Family(
        "Kimi Linear",
        "KimiLinearConfig",
        {
            **{**_KDA, **_NO_GROUPS, "linear_num_heads": 3, "linear_head_dim": 24},
            **{"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
        },
    ),
    Family(
        "Ling 3",
        "BailingHybridConfig",
        {
            **{**_KDA, **_GROUPS, "head_dim": 24, "short_conv_kernel_size": 3, "kda_lower_bound": -3.0},
            **{"num_hidden_layers": 4, "layer_group_size": 2, "num_mtp_layers": 0},
            # Limits that nothing reaches, since the reference has none.
            **{"expert_swiglu_limit_list": [0, 0, 0, 1e4], "share_expert_swiglu_limit_list": [0, 0, 1e4, 1e4]},
        },
    ),
    Family(
        "OLMo Hybrid",
        "OlmoHybridConfig",
        {
            **{"linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_key_head_dim": 16},
            **{"linear_value_head_dim": 24, "num_hidden_layers": 3, "attention_bias": True},
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": None},
        },
    ),
    Family("ERNIE 4.5", "Ernie4_5Config", {"head_dim": 24, "use_bias": True, **_rope(theta=500_000.0)}),
    Family(
        "Hunyuan",
        "HunYuanDenseV1Config",
        {
            **{"head_dim": 24, "attention_bias": True, "tie_word_embeddings": True},
            **_rope("dynamic", alpha=1000.0, factor=1.0, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0),
        },
    ),
    Family("Apertus", "ApertusConfig", {"attention_bias": True, **_LLAMA31}),
    Family(
        "Granite SWA",
        "GraniteSWAConfig",
        {
            **{"num_hidden_layers": 3, "sliding_window": 11, "layer_rope_theta": [10_000.0, 0, 500_000.0]},
            **{"attention_multiplier": 0.2, "embedding_multiplier": 12.0, "residual_multiplier": 0.22},
            **{"logits_scaling": 8.0, "attention_bias": True, "mlp_bias": True},
        },
    ),
    Family(
        "Granite 3, windows",
        "GraniteSWAConfig",
        {
            **{"num_hidden_layers": 3, "sliding_window": 11, "layer_rope_theta": [10_000.0, 0, 500_000.0]},
            **{"attention_multiplier": 0.2, "residual_multiplier": 0.22, "logits_scaling": 8.0},
        },
        architecture="GraniteForCausalLM",
    ),
    Family("Gemma", "GemmaConfig", {"head_dim": 32, "num_key_value_heads": 1, "attention_bias": True}),
    Family("GLM-4 9B", "GlmConfig", {"head_dim": 32, "attention_bias": True, **_rope(partial_rotary_factor=0.5)}),
    Family("Arcee", "ArceeConfig", {"attention_bias": True, "mlp_bias": True, **_YARN}),
    Family(
        "CWM",
        "CwmConfig",
        {**_TWO_KINDS, "head_dim": 24, "sliding_window": 11, "mlp_bias": True, "bos_token_id": 1, **_LLAMA31},
    ),
    Family("Helium", "HeliumConfig", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    Family(
        "VaultGemma",
        "VaultGemmaConfig",
        {
            **{"head_dim": 32, "query_pre_attn_scalar": 20, "sliding_window": 11},
            **{"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "attention_bias": True},
        },
    ),
    Family("Nemotron", "NemotronConfig", {"attention_bias": True, "mlp_bias": True}),
    Family("Jais 2", "Jais2Config", {}),
    Family("StableLM", "StableLmConfig", {"use_qkv_bias": True, **_rope(partial_rotary_factor=0.25)}),
    Family("StableLM, parallel", "StableLmConfig", {"use_parallel_residual": True}),
    Family("Phi", "PhiConfig", {"num_key_value_heads": 4, **_rope(partial_rotary_factor=0.5)}),
    Family("GPT-NeoX", "GPTNeoXConfig", {**_ALL_HEADS, **_rope(partial_rotary_factor=0.25)}),
    Family("GPT-NeoX, serial", "GPTNeoXConfig", {**_ALL_HEADS, "use_parallel_residual": False}),
    Family("OLMo", "OlmoConfig", {"clip_qkv": 0.5}),
    Family(
        "Youtu",
        "YoutuConfig",
        {
            key: value
            for key, value in _LATENT.items()
            if "expert" not in key and "moe" not in key and "dense" not in key
        },
    ),
    Family(
        "HyperCLOVA X",
        "HyperCLOVAXConfig",
        {
            **{"attention_multiplier": 0.2, "embedding_multiplier": 12.0, "residual_multiplier": 0.22},
            **{"logits_scaling": 0.125, "attention_bias": True, "mlp_bias": True},
        },
    ),
    Family(
        "Granite MoE Shared",
        "GraniteMoeSharedConfig",
        {
            **{"attention_multiplier": 0.2, "embedding_multiplier": 12.0, "residual_multiplier": 0.22},
            **{**_LOCAL_EXPERTS, "shared_intermediate_size": 48, "logits_scaling": 8.0},
        },
    ),
    Family(
        "Granite MoE SWA",
        "GraniteMoeSWAConfig",
        {
            **{"num_hidden_layers": 3, "sliding_window": 11, "layer_rope_theta": [10_000.0, 0, 500_000.0]},
            **{"attention_multiplier": 0.2, "residual_multiplier": 0.22, **_LOCAL_EXPERTS},
        },
    ),
    Family("Ministral", "MinistralConfig", {**_TWO_KINDS, "sliding_window": 11, "head_dim": 24}),
    Family("EXAONE", "ExaoneConfig", _LLAMA31, architecture="ExaoneForCausalLM"),
    Family("InternLM 2", "LlamaConfig", _rope(theta=1_000_000.0), architecture="InternLM2ForCausalLM"),
    Family("Solar Open", "SolarOpenConfig", {**_ROUTED_EXPERTS, "n_shared_experts": 2, "head_dim": 24, **_YARN}),
    Family("A.X K1", "AXK1Config", {**_LATENT, **_GROUPS}),
    Family("GPT-2", "GPT2Config", {**_GPT2, "n_inner": 96}),
    Family("StarCoder", "GPTBigCodeConfig", {**_GPT2, "n_inner": 96}),
    Family("StarCoder, heads of their own", "GPTBigCodeConfig", {**_GPT2, "multi_query": False}),
    Family("OPT", "OPTConfig", {**_ALL_HEADS, "ffn_dim": 96, "word_embed_proj_dim": 64, "intermediate_size": None}),
    Family(
        "OPT 350M",
        "OPTConfig",
        {
            **_ALL_HEADS,
            **{"ffn_dim": 96, "word_embed_proj_dim": 48, "intermediate_size": None, "do_layer_norm_before": False},
        },
    ),
    Family("Falcon 7B", "FalconConfig", {**_FALCON, "bias": True}),
    Family("Falcon 40B", "FalconConfig", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    Family(
        "Falcon 11B",
        "FalconConfig",
        {
            **_FALCON,
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "num_ln_in_parallel_attn": 1,
            "ffn_hidden_size": 96,
        },
    ),
    Family("GPT-J", "GPTJConfig", {**_GPT2, "rotary_dim": 8}),
    Family("CodeGen", "CodeGenConfig", {**_GPT2, "rotary_dim": 8}),
    Family(
        "BLOOM",
        "BloomConfig",
        {**_FALCON, "num_attention_heads": 6, "hidden_size": 96, "max_position_embeddings": None},
    ),
    Family("MPT", "MptConfig", {**_MPT, "attn_config": {"clip_qkv": 0.5}}),
    Family(
        "Falcon RW",
        "FalconConfig",
        {**_FALCON, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
    ),
    Family("StableLM 12B", "StableLmConfig", {"use_parallel_residual": True, "qk_layernorm": True}),
    Family(
        "Rnj-1",
        "Gemma3TextConfig",
        {
            **{"head_dim": 32, "query_pre_attn_scalar": 20, "final_logit_softcapping": 3.0, "sliding_window": 11},
            **{"layer_types": ["full_attention"] * 2, **_rope_by_layer_type(_YARN["rope_parameters"])},
        },
        architecture="Rnj1ForCausalLM",
    ),
    Family("TeleChat 3", "LlamaConfig", _YARN, architecture="Telechat3ForCausalLM"),
    Family("MiniCPM3", "MiniCPM3Config", _MINICPM3),
    Family(
        "MiniCPM",
        "GraniteConfig",
        {
            **{"embedding_multiplier": 12.0, "residual_multiplier": 1.4 / 2**0.5, "logits_scaling": 64 / 20},
            **{"attention_multiplier": 0.25, "tie_word_embeddings": True},
        },
        architecture="MiniCPMForCausalLM",
    ),
    Family(
        "Kolibri 1",
        "Kolibri1Config",
        {
            **{"num_hidden_layers": 5, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40},
            **{"shared_expert_intermediate_size": 48, "head_dim": 24, "sliding_window": 11, "intermediate_size": None},
        },
    ),
    Family(
        "Ling 2",
        "SarvamMoEConfig",
        {**_ROUTED_EXPERTS, **_GROUPS, "n_shared_experts": 2, "head_dim": 32, "partial_rotary_factor": 0.5},
        architecture="BailingMoeV2ForCausalLM",
    ),
    Family("FlexOLMo", "FlexOlmoConfig", {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 40}),
    Family(
        "Flint",
        "FlintConfig",
        {
            **{**_EXPERTS, "num_hidden_layers": 3, "mlp_only_layers": [0], "shared_expert_intermediate_size": 48},
            **{"head_dim": 24, "sliding_window": 11},
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    Family(
        "GPT-Neo",
        "GPTNeoConfig",
        {
            **{**_GPT2, "max_position_embeddings": 1024, "hidden_size": 64, "num_layers": 2, "num_heads": 4},
            **{"attention_types": [[["global", "local"], 1]], "window_size": 11},
        },
    ),
    Family(
        "Qwen2-VL",
        "Qwen2VLConfig",
        {"model_type": "qwen2_vl_text", **_rope(mrope_section=[2, 3, 3])},
        other_parts=_SEES,
    ),
    Family("GLM-4.1V", "Glm4vConfig", _rope(partial_rotary_factor=0.5, mrope_section=[1, 1, 2]), other_parts=_SEES),
    Family(
        "PaddleOCR-VL",
        "PaddleOCRVLConfig",
        {"model_type": "paddleocr_vl_text", "head_dim": 16, **_rope(mrope_section=[2, 3, 3])},
        other_parts=_SEES,
    ),
    Family("GLM-OCR", "GlmOcrConfig", {"head_dim": 32, **_MROPE}, other_parts=_SEES),
    Family("GLM-4.5V", "Glm4vMoeConfig", {**_GLM_MOE, "head_dim": 32, **_MROPE}, other_parts=_SEES),
    Family("LFM2-VL", "Lfm2VlConfig", _LFM2_VL, other_parts=_SEES),
    Family("LLaVA", "LlavaConfig", {"model_type": "llama"}, other_parts=_SEES),
    Family("LLaVA-NeXT", "LlavaNextConfig", {"model_type": "mistral"}, other_parts=_SEES),
    Family(
        "Granite Vision",
        "LlavaNextConfig",
        # The reference does not scale the logits of models that see.
        {"model_type": "granite", "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2},
        other_parts=_SEES,
    ),
    Family("LLaVA-NeXT-Video", "LlavaNextVideoConfig", {"model_type": "llama"}, other_parts=_SEES),
    Family("LLaVA-OneVision", "LlavaOnevisionConfig", {"model_type": "qwen2"}, other_parts=_SEES),
    Family("ViP-LLaVA", "VipLlavaConfig", {"model_type": "llama"}, other_parts=_SEES),
    Family("Voxtral", "VoxtralConfig", {"model_type": "llama"}, other_parts=_HEARS),
    Family("Qwen2-Audio", "Qwen2AudioConfig", {"model_type": "qwen2"}, other_parts=_HEARS),
    Family(
        "Llama 3.2 Vision",
        "MllamaConfig",
        {"cross_attention_layers": [1, 3], "num_hidden_layers": 5, "bos_token_id": 1, "eos_token_id": 2, **_LLAMA31},
        other_parts=_SEES,
    ),
    Family("InternVL", "InternVLConfig", {"model_type": "qwen2", "tie_word_embeddings": True}, other_parts=_SEES),
    Family("SmolVLM", "SmolVLMConfig", {"model_type": "llama"}, other_parts=_SEES),
    Family("Idefics3", "Idefics3Config", {"model_type": "llama"}, other_parts=_SEES),
    # The reference does not scale the logits of models that see.
    Family(
        "Aya Vision", "AyaVisionConfig", {**_TWO_KINDS, "sliding_window": 11, "logit_scale": 1.0}, other_parts=_SEES
    ),
    Family(
        "Command A Vision",
        "Cohere2VisionConfig",
        {**_TWO_KINDS, "sliding_window": 11, "logit_scale": 1.0},
        other_parts=_SEES,
    ),
    Family(
        "EXAONE 4.5",
        "Exaone4_5_Config",
        {"model_type": "exaone4", **_TWO_KINDS, "sliding_window": 11},
        other_parts=_SEES,
    ),
    Family("LightOnOCR", "LightOnOcrConfig", {"model_type": "qwen3", "tie_word_embeddings": True}, other_parts=_SEES),
)

# Rows whose tests are slow ones: another has their class, and another, or a test of the part alone, each setting.
SLOW_NAMES = {
    *("Llama 2", "Llama, biases", "Llama, head_dim, one kv head"),
    *("Llama, linear rope", "Llama, dynamic rope", "Llama, yarn rope"),
    *("Qwen2, tied", "Qwen2.5, yarn rope", "Qwen3, tied", "Qwen3, biases, yarn rope", "Mistral"),
    *("Phi-4-mini, partial longrope, tied", "Phi-4", "Command R"),
    *("Qwen3 MoE, dense layers between, biases", "Llama 4, dense layers between, no norms"),
    *("GLM-4.5 MoE, groups, two dense layers", "DeepSeek V3, half-split rope, biases", "Kimi K2"),
    *("EXAONE 4, no windows", "Granite 4, dense, attention alone", "Granite SWA"),
    *("Llama 3.1", "MiMo", "Qwen2, window layers", "DeepSeek V2, biases", "Qwen3.5 MoE", "Cohere 2 MoE"),
    *("GLM-4 9B", "Arcee", "CWM", "Helium", "VaultGemma", "Nemotron", "Jais 2", "StableLM"),
    *("StableLM, parallel", "GPT-NeoX, serial", "Youtu", "HyperCLOVA X", "Granite MoE Shared", "Ministral"),
    *("EXAONE", "Solar Open", "A.X K1", "StarCoder", "StarCoder, heads of their own", "Falcon 7B", "Falcon 11B"),
    *(
        "Granite 3, windows",
        "OPT 350M",
        "TeleChat 3",
        "Rnj-1",
        "MiniCPM3",
        "MiniCPM",
        "Kolibri 1",
        "Ling 2",
        "PaddleOCR-VL",
    ),
    *("CodeGen", "InternLM 2", "MPT", "Falcon RW", "StableLM 12B"),
    *("GPT-J", "FlexOLMo", "GPT-Neo", "Qwen2-VL", "GLM-4.1V", "GLM-OCR", "GLM-4.5V", "LFM2-VL", "LLaVA"),
    *(
        "Granite Vision",
        "LLaVA-NeXT-Video",
        "LLaVA-OneVision",
        "ViP-LLaVA",
        "Voxtral",
        "Qwen2-Audio",
        "Llama 3.2 Vision",
    ),
    *("InternVL", "Idefics3", "Aya Vision", "Command A Vision", "EXAONE 4.5", "LightOnOCR", "Granite Vision"),
}
# One of each kind of cache, state, position and step: of these, all paths are compared every time. Norms, routers and
# residuals are the same in every path, so the two paths that are compared of all families show them.
EVERY_KIND = {
    *("Llama 3", "Qwen3", "Gemma 3n", "Gemma 4, shared keys and values, embeddings of layers", "Phi-3, longrope"),
    *("GPT-OSS", "Llama 4", "DeepSeek V3", "DeepSeek V3.2", "GLM-5.2", "MiMo V2 Flash", "Qwen3.5", "LFM2"),
    *("Nemotron 3", "Falcon-H1", "Jamba", "Mamba2", "Kimi Linear", "Ling 3"),
}


def with_native_heads(family: Family) -> Family:
    """The family, with heads twice as large where native attention, which takes multiples of 16, has none of the size.

    Twice, so that parts of a head, such as those that RoPE rotates, stay whole numbers.
    """
    size = family.config.get("head_dim", 16)
    return family if size % 16 == 0 else dataclasses.replace(family, config={**family.config, "head_dim": 2 * size})


@lru_cache(NUM_KEPT)
def reference_model(family: Family) -> transformers.PreTrainedModel:
    """A tiny transformers model whose every parameter, norms and biases included, is random."""
    values = {
        key: value
        for key, value in (_SIZES | family.config).items()
        # None leaves a size out, which the family calls otherwise; every other key has it as a value.
        if value is not None or key not in _SIZES or key.endswith("token_id")
    }
    if family.other_parts is not None:
        values = {"text_config": values, **family.other_parts}
    # Eagerly, the reference adds Falcon's ALiBi twice.
    attention = "sdpa" if values.get("alibi") else "eager"
    config = getattr(transformers, family.config_class)(**values, attn_implementation=attention)
    torch.manual_seed(0)
    auto_class = transformers.AutoModelForCausalLM
    if family.other_parts is not None or family.config_class == "Mistral4Config":  # listed with models that see
        auto_class = transformers.AutoModelForMultimodalLM
    model = auto_class.from_config(config).float().eval()
    for name, _ in list(model.model.named_children()) if family.other_parts is not None else ():
        # Qwen2-Audio's reference asks its encoder for its type even without sound.
        if name not in ("language_model", "text_model") and family.config_class != "Qwen2AudioConfig":
            delattr(model.model, name)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norms around 1, so that a missing one shows and activations keep their size. But not what all keys of an
            # indexer have in common: many scores would be 0, and torch.topk takes any of equals.
            center = 1.0 if "norm" in name and not name.endswith("indexer.k_norm.bias") else 0.0
            parameter.copy_(center + 0.2 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(0.2 * torch.randn_like(buffer))
            if name.endswith("layer_scalar"):
                buffer.copy_(1.0 + 0.2 * torch.randn_like(buffer))
    return model


@functools.cache  # small, and asked for by tests of several files
def checkpoint_folder(family: Family) -> str:
    """The model saved as transformers saves it. The folder goes when the process does."""
    folder = tempfile.TemporaryDirectory(prefix="jaxis_parity_")
    _folders.append(folder)
    reference_model(family).save_pretrained(folder.name)
    if (rename := _RENAMED.get(family.architecture or family.config_class)) is not None:
        path = Path(folder.name, "model.safetensors")
        save_file(rename(load_file(path)), path, {"format": "pt"})
    if family.architecture is not None:
        path = Path(folder.name, "config.json")
        saved = json.loads(path.read_text())
        values = saved if family.other_parts is None else saved["text_config"]
        published = _PUBLISHED_KEYS.get(family.architecture, {})
        path.write_text(json.dumps(values | {"architectures": [family.architecture], **published}))
    return folder.name


# What transformers saves under other names than those that it was published with, and that it loads as well.
def _published_kimi_linear(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Of dense layers, too, it saves the feed-forward block as a mixture's."""
    pattern = re.compile(r"\.block_sparse_moe\.(gate_proj|up_proj|down_proj)\.")
    return {pattern.sub(r".mlp.\1.", name): tensor for name, tensor in tensors.items()}


def _published_bailing_hybrid(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Of layers with a state, too, it saves the last projection as that of latent attention."""
    linear = {name.removesuffix("A_log") for name in tensors if name.endswith(".A_log")}
    renamed = {f"{prefix}dense.weight": f"{prefix}o_proj.weight" for prefix in linear}
    return {renamed.get(name, name): tensor for name, tensor in tensors.items()}


def _published_olmo_hybrid(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """It saves the convolutions in three equal parts, and the norms after attention as those of other layers."""
    for name in [name for name in tensors if name.endswith(".q_conv1d.weight")]:
        prefix = name.removesuffix("q_conv1d.weight")
        joined = np.concatenate([tensors[f"{prefix}{part}_conv1d.weight"] for part in "qkv"])
        ends = np.cumsum([len(tensors[f"{prefix}{part}_proj.weight"]) for part in "qk"])
        for part, rows in zip("qkv", np.split(joined, ends), strict=True):
            tensors[f"{prefix}{part}_conv1d.weight"] = np.ascontiguousarray(rows)
    for name in [name for name in tensors if name.endswith(".self_attn.q_norm.weight")]:
        prefix = name.removesuffix("self_attn.q_norm.weight")
        norm = tensors.pop(f"{prefix}feedforward_layer_norm.weight")
        tensors[f"{prefix}post_attention_layernorm.weight"] = norm
    return tensors


def _published_cohere2_vision(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """It saves the text model's tensors under two prefixes."""
    return {name.replace("model.language_model.", "model."): tensor for name, tensor in tensors.items()}


def _published_internlm2(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Llama's tensors as InternLM 2 was published: its names, and a projection of each group of heads after another."""
    names = {
        **{"embed_tokens": "tok_embeddings", "lm_head": "output", "self_attn.o_proj": "attention.wo"},
        **{"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm"},
        **{"mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2"},
    }
    found = {}
    for name, tensor in tensors.items():
        if name.endswith("q_proj.weight"):
            q, k, v = (tensors[name.replace("q_proj", f"{each}_proj")] for each in "qkv")
            groups = _SIZES["num_key_value_heads"]
            rows = [each.reshape(groups, -1, each.shape[1]) for each in (q, k, v)]
            packed = np.concatenate(rows, axis=1).reshape(-1, q.shape[1])
            found[name.replace("self_attn.q_proj", "attention.wqkv")] = packed
        elif not name.endswith(("k_proj.weight", "v_proj.weight")):
            for old, new in names.items():
                name = name.replace(old, new)
            found[name] = tensor
    return found


_PUBLISHED_KEYS = {
    "Telechat3ForCausalLM": {
        **{"model_type": "telechat3", "rope_parameters": None, "rope_theta": 1_000_000.0},
        "rope_scaling": _YARN["rope_parameters"] | {"rope_type": "telechat3-yarn", "type": "telechat3-yarn"},
    },
    "GraniteForCausalLM": {"model_type": "granite", "attention_sinks": True},
    "MiniCPMForCausalLM": {
        **{"model_type": "minicpm", "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 20},
        **{"embedding_multiplier": None, "residual_multiplier": None, "logits_scaling": None},
        **{"attention_multiplier": None, "mlp_bias": None},
    },
    "BailingMoeV2ForCausalLM": {
        **{"model_type": "bailing_moe", "num_experts": 8, "num_shared_experts": 2, "use_qkv_bias": False},
        **{"n_routed_experts": None, "n_shared_experts": None, "attention_bias": None},
    },
    "InternLM2ForCausalLM": {"model_type": "internlm2", "bias": False, "attention_bias": None, "mlp_bias": None},
}
_RENAMED = {
    "InternLM2ForCausalLM": _published_internlm2,
    "Cohere2VisionConfig": _published_cohere2_vision,
    "BailingHybridConfig": _published_bailing_hybrid,
    "KimiLinearConfig": _published_kimi_linear,
    "OlmoHybridConfig": _published_olmo_hybrid,
}


_folders: list[tempfile.TemporaryDirectory] = []


@lru_cache(2 * NUM_KEPT)
def loaded_model(family: Family, dtype: Any = jnp.float32) -> nnx.Module:
    """The checkpoint as jaxis loads it."""
    folder = checkpoint_folder(family)
    model_config = ModelConfig(folder, HFConfig.from_folder(folder), dtype=dtype, max_model_len=1024)
    return load_model(VllmConfig(model_config), make_mesh())


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(1, _SIZES["vocab_size"], length).tolist()


@lru_cache(8 * NUM_KEPT)
def reference_run(family: Family, length: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """transformers' logits [T, V] and hidden states (entering each layer, and after the final norm), each [T, E]."""
    model, input_ids = reference_model(family), torch.tensor([prompt(length)])
    with torch.no_grad():
        result = model(input_ids, output_hidden_states=True, use_cache=False)
        hidden_states = result.hidden_states
        if family.config_class in ("FalconMambaConfig", "Mamba2Config"):  # which list what leaves each layer
            hidden_states = (model.get_input_embeddings()(input_ids), *hidden_states[:-2], hidden_states[-1])
        if family.name == "OPT 350M":  # which lists what its last projection makes of it
            states: list[torch.Tensor] = []
            hook = model.model.decoder.project_out.register_forward_pre_hook(lambda _, args: states.append(args[0]))
            model(input_ids, use_cache=False)
            hook.remove()
            hidden_states = (*hidden_states[:-1], *states)
        if family.config_class == "Gemma3nTextConfig":  # [A, 1, T, E], and those that leave the last layer
            states = (states.transpose(0, 2).transpose(0, 1) for states in hidden_states[:-1])
            hidden_states = (*states, model.model(input_ids, use_cache=False).last_hidden_state)
    return result.logits[0].numpy(), [states[0].numpy() for states in hidden_states]


def bfloat16_reference_logits(family: Family, length: int) -> np.ndarray:
    """transformers' logits [T, V] with everything in bfloat16."""
    model = copy.deepcopy(reference_model(family)).to(torch.bfloat16)
    with torch.no_grad():
        return model(torch.tensor([prompt(length)]), use_cache=False).logits[0].float().numpy()


@lru_cache(4 * NUM_KEPT)
def whole_run(
    family: Family, lengths: tuple[int, ...] = PROMPT_LENGTHS, dtype: Any = jnp.float32
) -> dict[int, tuple[np.ndarray, list[np.ndarray]]]:
    """As `reference_run`, for prompts of these lengths in one flat batch without a cache."""
    return run_model(loaded_model(family, dtype), lengths)


def run_model(model: nnx.Module, lengths: tuple[int, ...]) -> dict[int, tuple[np.ndarray, list[np.ndarray]]]:
    """`whole_run` of a model that has been loaded."""
    model.decoder.aux_hidden_state_layers = tuple(range(len(model.decoder.layers)))
    graph, state = nnx.split(model)
    model.decoder.aux_hidden_state_layers = ()

    @jax.jit
    def forward(state: nnx.State, input_ids: jax.Array, metadata: AttentionMetadata) -> tuple[jax.Array, list]:
        merged = nnx.merge(graph, state)
        _, hidden, aux = merged(None, input_ids, metadata)
        return merged.compute_logits(hidden), [*aux, hidden]

    input_ids = jnp.asarray(np.concatenate([prompt(length) for length in lengths]), jnp.int32)
    logits, states = forward(state, input_ids, AttentionMetadata.for_whole_sequences(lengths))
    ends = np.cumsum(lengths)
    return {
        length: (np.asarray(logits)[end - length : end], [np.asarray(s)[end - length : end] for s in states])
        for length, end in zip(lengths, ends, strict=True)
    }


@lru_cache(2 * NUM_KEPT)
def paged_sequences(family: Family, dtype: Any = jnp.float32) -> PagedSequences:
    return PagedSequences(loaded_model(family, dtype), dtype=dtype)


# One size for every step, since compiling costs more than the padding.
PADDING = {"pad_tokens": PAGED_LENGTH + 4, "pad_requests": 4}


def prefill(family: Family, tokens: Sequence[int]) -> np.ndarray:
    """Logits of a whole prompt run in one step, padded."""
    (logits,) = paged_sequences(family).step([(PagedSequence(), tokens)], **PADDING)
    return logits


def chunked(family: Family, tokens: Sequence[int], chunk: int) -> np.ndarray:
    """Logits of a prompt run in chunks, each beside a decode of another sequence."""
    paged, sequence, other = paged_sequences(family), PagedSequence(), PagedSequence()
    parts = [
        paged.step([(sequence, tokens[i : i + chunk]), (other, [5])], **PADDING)[0]
        for i in range(0, len(tokens), chunk)
    ]
    return np.concatenate(parts)


def prefix_shared(family: Family, tokens: Sequence[int], shared: int) -> np.ndarray:
    """Logits after a prefix whose blocks another sequence filled, while that one goes on beside it."""
    paged, owner = paged_sequences(family), PagedSequence()
    paged.step([(owner, tokens[:shared])], **PADDING)
    sequence = paged.fork(owner, shared)
    (logits, _) = paged.step([(sequence, tokens[shared:]), (owner, [7])], **PADDING)
    return logits


# (family, tokens) -> the first token whose logits it gives, and its and the following ones'.
PATHS = {
    "prefill": lambda family, tokens: (0, prefill(family, tokens)),
    "chunks of 7": lambda family, tokens: (0, chunked(family, tokens, 7)),
    "token by token": lambda family, tokens: (0, chunked(family, tokens[:SINGLE_STEPS], 1)),
    "shared prefix": lambda family, tokens: (64, prefix_shared(family, tokens, 64)),
}


def path_error(family: Family, path: str) -> float:
    """Relative error of a paged path's logits against transformers'."""
    start, logits = PATHS[path](family, prompt(PAGED_LENGTH))
    return relative_error(logits, reference_run(family, PAGED_LENGTH)[0][start : start + len(logits)])


def greedy_tokens(family: Family, tokens: Sequence[int], num_tokens: int = GREEDY_TOKENS) -> list[int]:
    """The most likely continuation, decoded through the cache."""
    paged, sequence = paged_sequences(family), PagedSequence()
    (logits,) = paged.step([(sequence, tokens)], **PADDING)
    produced = [int(logits[-1].argmax())]
    while len(produced) < num_tokens:
        (logits,) = paged.step([(sequence, produced[-1:])], **PADDING)
        produced.append(int(logits[-1].argmax()))
    return produced


def reference_greedy_tokens(family: Family, tokens: Sequence[int], num_tokens: int = GREEDY_TOKENS) -> list[int]:
    with torch.no_grad():
        output = reference_model(family).generate(
            torch.tensor([tokens]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None
        )
    return output[0, len(tokens) :].tolist()


def reference_states(family: Family, steps: Sequence[Sequence[int]]) -> Iterator[list[list[np.ndarray]]]:
    """What transformers' cache holds after each of these steps, of each layer that has a state.

    Yields:
      For each layer the inputs of its convolution [W, C], and the recurrent state [H, ...] where it has one.
    """
    model = reference_model(family)
    name = "cache_params" if family.config_class == "Mamba2Config" else "past_key_values"
    cache, start = None, 0
    for tokens in steps:
        # Which Bamba does not find out itself where the first layer has a state.
        positions = torch.arange(start, start + len(tokens))[None]
        start += len(tokens)
        arguments = {} if name == "cache_params" else {"position_ids": positions}
        with torch.no_grad():
            cache = model(torch.tensor([tokens]), **{name: cache}, **arguments, use_cache=True)[name]
        layers = [layer for layer in cache.layers if hasattr(layer, "conv_states")]
        yield [
            [layer.conv_states[0][0].T.numpy()]
            + [state[0].numpy() for state in layer.recurrent_states.values() if state is not None]
            for layer in layers
        ]


def layer_error(family: Family, length: int) -> float:
    """Largest relative error of any layer's hidden states."""
    states, expected = whole_run(family)[length][1], reference_run(family, length)[1]
    return max(relative_error(a, e) for a, e in zip(states, expected, strict=True))


def logits_error(family: Family, length: int) -> float:
    return relative_error(whole_run(family)[length][0], reference_run(family, length)[0])


def main() -> None:
    lengths = " | ".join(f"logits, {length} tokens" for length in PROMPT_LENGTHS)
    print(f"| family | {lengths} | layers | greedy | {' | '.join(PATHS)} |")
    print("|---" * (4 + len(PROMPT_LENGTHS) + len(PATHS) - 1) + "|")
    for family in FAMILIES:
        figures = [f"{logits_error(family, length):.1e}" for length in PROMPT_LENGTHS]
        figures.append(f"{max(layer_error(family, length) for length in PROMPT_LENGTHS):.1e}")
        produced, expected = greedy_tokens(family, prompt(17)), reference_greedy_tokens(family, prompt(17))
        figures.append(f"{sum(p == e for p, e in zip(produced, expected, strict=True))}/{GREEDY_TOKENS}")
        figures += [f"{path_error(family, path):.1e}" for path in PATHS]
        print(f"| {family.name} | {' | '.join(figures)} |", flush=True)


if __name__ == "__main__":
    main()
