"""Writes a checkpoint in Hugging Face format as llama.cpp's converters would write it in GGUF.

Keys, names and changes of tensors follow llama.cpp's `conversion/*.py`, through gguf-py's writer and name map: nothing
here is shared with how jaxis reads a GGUF file.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.numpy import load_file

from tests.support.gguf_stream_models import ngram_keys, stream_keys, stream_tensors
from tests.support.parity import FAMILIES, architecture_of

Tensors = dict[str, np.ndarray]

# `architectures` -> llama.cpp's name of it.
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "GraniteForCausalLM": "granite",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Qwen2_5_VLForConditionalGeneration": "qwen2vl",
    "Qwen2VLForConditionalGeneration": "qwen2vl",
    "Qwen3VLForConditionalGeneration": "qwen3vl",
    "Phi3ForCausalLM": "phi3",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo2",
    "GptOssForCausalLM": "gpt-oss",
    "Starcoder2ForCausalLM": "starcoder2",
    "Glm4ForCausalLM": "glm4",
    "Glm4MoeForCausalLM": "glm4moe",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "CohereForCausalLM": "command-r",
    "Cohere2ForCausalLM": "cohere2",
    "DeepseekV2ForCausalLM": "deepseek2",
    "DeepseekV3ForCausalLM": "deepseek2",
    "Glm4MoeLiteForCausalLM": "deepseek2",
    "DeepseekV32ForCausalLM": "deepseek32",
    "GlmMoeDsaForCausalLM": "glm-dsa",
    "Mistral4ForCausalLM": "mistral4",
    "AfmoeForCausalLM": "afmoe",
    "MellumForCausalLM": "mellum",
    "ExaoneMoeForCausalLM": "exaone-moe",
    "HYV3ForCausalLM": "hy_v3",
    "KimiLinearForCausalLM": "kimi-linear",
    "BailingHybridForCausalLM": "bailingmoe3",
    "MiniCPM3ForCausalLM": "minicpm3",
    "GraniteSWAForCausalLM": "granite_swa",
    "Cohere2MoeForCausalLM": "cohere2moe",
    "HrmTextForCausalLM": "hrm_text",
    "Llama4ForCausalLM": "llama4",
    "Ministral3ForCausalLM": "mistral3",
    "SmolLM3ForCausalLM": "smollm3",
    "MiniMaxM2ForCausalLM": "minimax-m2",
    "MiniMaxM3SparseForConditionalGeneration": "minimax-m3",
    "DeepseekV4ForCausalLM": "deepseek4",
    "Qwen4ExpForCausalLM": "qwen4exp",
    "Glm5NextForConditionalGeneration": "glm5-next",
    "KimiK3ForCausalLM": "kimi-k3",
    "HYV4ForCausalLM": "hy_v4",
    "Qwen3_5ForCausalLM": "qwen35",
    "Qwen3_5MoeForCausalLM": "qwen35moe",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2moe",
    "GPT2LMHeadModel": "gpt2",
    "GPTBigCodeForCausalLM": "starcoder",
    "GPTNeoXForCausalLM": "gptneox",
    "FalconForCausalLM": "falcon",
    "BloomForCausalLM": "bloom",
    "MptForCausalLM": "mpt",
    "PhiForCausalLM": "phi2",
    "StableLmForCausalLM": "stablelm",
    "GemmaForCausalLM": "gemma",
    "InternLM2ForCausalLM": "internlm2",
    "ExaoneForCausalLM": "exaone",
    "NemotronForCausalLM": "nemotron",
    "GlmForCausalLM": "chatglm",
    "Exaone4ForCausalLM": "exaone4",
    "OlmoeForCausalLM": "olmoe",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "HunYuanDenseV1ForCausalLM": "hunyuan-dense",
    "ApertusForCausalLM": "apertus",
    "OlmoForCausalLM": "olmo",
    "Dots1ForCausalLM": "dots1",
    "BailingMoeV2ForCausalLM": "bailingmoe2",
    "Ernie4_5_MoeForCausalLM": "ernie4_5-moe",
    "HunYuanMoEV1ForCausalLM": "hunyuan-moe",
    "GraniteMoeForCausalLM": "granitemoe",
    "GraniteMoeSharedForCausalLM": "granitemoe",
    "PhimoeForCausalLM": "phimoe",
    "Gemma3nForCausalLM": "gemma3n",
    "Gemma4ForCausalLM": "gemma4",
    "Qwen3NextForCausalLM": "qwen3next",
    "MambaForCausalLM": "mamba",
    "FalconMambaForCausalLM": "mamba",
    "Mamba2ForCausalLM": "mamba2",
    "JambaForCausalLM": "jamba",
    "GraniteMoeHybridForCausalLM": "granitehybrid",
    "FalconH1ForCausalLM": "falcon-h1",
    "NemotronHForCausalLM": "nemotron_h_moe",
    **{architecture_of(family): family.gguf["architecture"] for family in FAMILIES if family.gguf},
}
# Whose rows of queries and keys `LlamaModel.permute` changes.
_ROWS = {family.gguf["architecture"]: family.gguf for family in FAMILIES if family.gguf}
_PERMUTED = {
    *("llama", "granite", "granite_swa", "mistral3", "smollm3", "olmo", "granitemoe", "granitehybrid"),
    *(name for name, row in _ROWS.items() if row.get("permutes_rope")),
}
_USUAL_KEYS = {
    **dict.fromkeys(("n_embd", "d_model"), "hidden_size"),
    **dict.fromkeys(("n_head", "n_heads"), "num_attention_heads"),
    **dict.fromkeys(("n_layer", "n_layers", "num_layers"), "num_hidden_layers"),
    **dict.fromkeys(("n_positions", "max_seq_len"), "max_position_embeddings"),
    **dict.fromkeys(("n_inner", "ffn_hidden_size"), "intermediate_size"),
    "num_kv_heads": "num_key_value_heads",
    "norm_eps": "layer_norm_eps",
}
STREAMS = ("deepseek4", "qwen4exp", "glm5-next", "kimi-k3", "hy_v4")  # not all of these have streams
QuantizedRows = tuple[np.ndarray, gguf.GGMLQuantizationType]


def write_gguf(
    folder: Path,
    path: Path,
    *,
    quantize: Callable[[str, np.ndarray], QuantizedRows | None] = lambda *_: None,
    keys: Mapping[str, Any] | None = None,
    separate_latent_heads: bool = True,
    split_max_tensors: int = 0,
    more: Callable[[gguf.GGUFWriter], None] = lambda _: None,
) -> dict[str, Any]:
    """Writes a GGUF file of float32, or of what `quantize` makes of a tensor.

    Args:
      folder: A checkpoint with one safetensors file.
      path: The file to write.
      quantize: (name in the file, float32 tensor) -> rows of blocks [..., bytes] and their type; None leaves it.
      keys: Further integer keys, or those to leave out (None), below the architecture.
      separate_latent_heads: Whether latent attention has `attn_k_b` and `attn_v_b`, as newer files have.
      split_max_tensors: Tensors of a shard; 0 writes one file.
      more: Adds other keys.

    Returns:
      The keys below the architecture.
    """
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[config["architectures"][0]]
    if architecture in ("minimax-m3", "glm5-next"):
        config |= config["text_config"]
    if architecture == "nemotron_h_moe":
        config["num_hidden_layers"] = len(config["layers_block_type"])
        if "moe" not in config["layers_block_type"]:  # as the config.json of such a model has no keys of experts
            architecture = "nemotron_h"
            config = {key: value for key, value in config.items() if not re.search("expert|moe|group$|routed", key)}
    if architecture in _SPECIAL_KEYS_OF_CLASSICS:
        config = {_USUAL_KEYS.get(key, key): value for key, value in config.items()}
    values = _keys(config, architecture, separate_latent_heads) | dict(keys or {})
    values = {key: value for key, value in values.items() if value is not None}
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split_max_tensors)
    for key, value in values.items():
        add_key(writer, f"{architecture}.{key}", value)
    more(writer)
    tensors = load_file(folder / "model.safetensors")
    if architecture == "apertus":
        _add_activations(writer, config["num_hidden_layers"], tensors)
    if architecture == "qwen4exp":
        for key, numbers in ngram_keys(tensors).items():
            writer.add_key_value(f"{architecture}.{key}", numbers, gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT64)
        tensors = {n: t if ".ple." in n else _of_delta_net(config, n, t) for n, t in tensors.items()}
    if architecture in STREAMS:
        tensors = stream_tensors(architecture, config, tensors)
    else:
        tensors = _tensors(config, architecture, tensors, separate_latent_heads)
    for name, tensor in tensors.items():
        is_table = tensor.dtype == np.int32
        tensor = np.ascontiguousarray(tensor if is_table else tensor.astype(np.float32))
        rows = quantize(name, tensor) if tensor.ndim > 1 and not is_table else None
        if rows is None:
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, rows[0], raw_dtype=rows[1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def _add_activations(writer: gguf.GGUFWriter, num_layers: int, tensors: Tensors) -> None:
    """Takes the numbers of Apertus' activations out of the tensors, which are keys of the file."""
    for name in ("alpha_n", "alpha_p", "beta", "eps"):
        numbers = [tensors.pop(f"model.layers.{layer}.mlp.act_fn.{name}") for layer in range(num_layers)]
        add_key(writer, f"xielu.{name}", [float(number.reshape(())) for number in numbers])


def add_key(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    """Adds a key with the type of number that llama.cpp's converter gives it."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _keys(config: dict[str, Any], architecture: str, separate_latent_heads: bool) -> dict[str, Any]:
    """What `set_gguf_parameters` writes."""
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    rope = config.get("rope_parameters") or {}
    full_rope = rope.get("full_attention", rope)
    values = {
        "block_count": config["num_hidden_layers"],
        "context_length": config.get("max_position_embeddings", 2048),
        "embedding_length": hidden,
        "feed_forward_length": config.get("intermediate_size"),
        "attention.head_count": heads,
        "attention.head_count_kv": config.get("num_key_value_heads"),
        "rope.freq_base": float(full_rope["rope_theta"]) if "rope_theta" in full_rope else None,
        "rope.freq_base_swa": rope.get("sliding_attention", {}).get("rope_theta"),
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps"),
        "attention.layer_norm_epsilon": next(
            (config[key] for key in ("layer_norm_eps", "norm_epsilon", "layer_norm_epsilon") if key in config), None
        ),
        "expert_count": config.get("num_local_experts", config.get("num_experts", config.get("n_routed_experts"))),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_group_count": config.get("n_group"),
        "expert_group_used_count": config.get("topk_group"),
        "attention.key_length": config.get("head_dim"),
        "attention.value_length": config.get("head_dim"),
    }
    if full_rope.get("rope_type") == "linear":
        values |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(full_rope["factor"])}
    if full_rope.get("rope_type") == "yarn":
        values |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(full_rope["factor"]),
            "rope.scaling.original_context_length": full_rope["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": full_rope.get("beta_fast"),
            "rope.scaling.yarn_beta_slow": full_rope.get("beta_slow"),
        }
    if full_rope.get("rope_type") == "longrope":
        values |= {"rope.scaling.type": "longrope"}
    head_dim = config.get("head_dim") or hidden // heads
    if architecture in STREAMS:
        return values | stream_keys(architecture, config)
    values |= _SPECIAL_KEYS.get(architecture, _llama_keys)(config, head_dim, full_rope, separate_latent_heads)
    return values | _ROWS.get(architecture, {}).get("keys", {})


def _llama_keys(config: dict, head_dim: int, *_: Any) -> dict[str, Any]:
    return {"vocab_size": config["vocab_size"], "rope.dimension_count": head_dim}


def _granite_keys(config: dict, head_dim: int, *_: Any) -> dict[str, Any]:
    return {
        **_llama_keys(config, head_dim),
        "attention.key_length": None,
        "attention.value_length": None,
        "attention.scale": config["attention_multiplier"],
        "embedding_scale": config["embedding_multiplier"],
        "residual_scale": config["residual_multiplier"],
        "logit_scale": config["logits_scaling"],
    }


def _qwen_vl_keys(config: dict, _: int, rope: dict, *__: Any) -> dict[str, Any]:
    return {"rope.dimension_sections": [*rope["mrope_section"], 0]}


def _qwen3vl_keys(config: dict, head_dim: int, rope: dict, *_: Any) -> dict[str, Any]:
    return {**_qwen_vl_keys(config, head_dim, rope), "n_deepstack_layers": 2}


def _qwen3moe_keys(config: dict, *_: Any) -> dict[str, Any]:
    return {"expert_feed_forward_length": config["moe_intermediate_size"]}


def _phi3_keys(config: dict, head_dim: int, rope: dict, *_: Any) -> dict[str, Any]:
    original = rope.get("original_max_position_embeddings") or config["original_max_position_embeddings"]
    values = {
        "rope.scaling.original_context_length": original,
        "rope.dimension_count": int(rope.get("partial_rotary_factor", 1.0) * head_dim),
        "attention.sliding_window": config.get("sliding_window") or 0,
        "rope.scaling.type": None,
        "attention.key_length": None,
        "attention.value_length": None,
    }
    if rope["rope_type"] == "longrope":
        scale = config["max_position_embeddings"] / original
        values["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(scale) / math.log(original))
    return values


def _olmo2_keys(config: dict, *_: Any) -> dict[str, Any]:
    if "sliding_window" not in config:
        return {}
    pattern = [kind == "sliding_attention" for kind in config["layer_types"]]
    return {"attention.sliding_window": config["sliding_window"], "attention.sliding_window_pattern": pattern}


def _gpt_oss_keys(config: dict, *_: Any) -> dict[str, Any]:
    return {
        "attention.sliding_window": config["sliding_window"],
        "expert_feed_forward_length": config["intermediate_size"],
    }


def _glm4_keys(config: dict, head_dim: int, rope: dict, *_: Any) -> dict[str, Any]:
    return {"rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 0.5))}


def _glm4moe_keys(config: dict, head_dim: int, rope: dict, *_: Any) -> dict[str, Any]:
    return {
        **_glm4_keys(config, head_dim, rope),
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["n_shared_experts"],
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_gating_func": 2,
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_weights_norm": config["norm_topk_prob"],
    }


def _gemma2_keys(config: dict, *_: Any) -> dict[str, Any]:
    return {
        "attn_logit_softcapping": config["attn_logit_softcapping"],
        "final_logit_softcapping": config["final_logit_softcapping"],
        "attention.sliding_window": config["sliding_window"],
        "rope.freq_base": None,
    }


def _gemma3_keys(config: dict, *_: Any) -> dict[str, Any]:
    return {
        "final_logit_softcapping": config.get("final_logit_softcapping"),
        "attention.sliding_window": config["sliding_window"],
    }


def _cohere_keys(config: dict, *_: Any) -> dict[str, Any]:
    return {"logit_scale": config["logit_scale"], "rope.scaling.type": "none"}


def _cohere2_keys(config: dict, head_dim: int, *_: Any) -> dict[str, Any]:
    return {
        **_cohere_keys(config),
        "attention.sliding_window": config["sliding_window"],
        "vocab_size": config["vocab_size"],
        "rope.dimension_count": head_dim,
    }


def _deepseek2_keys(config: dict, _: int, rope: dict, separate_latent_heads: bool) -> dict[str, Any]:
    nope, rotary, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    sizes = {
        "attention.head_count_kv": config["num_attention_heads"],
        "attention.key_length": nope + rotary,
        "attention.value_length": value,
    }
    if separate_latent_heads:
        sizes = {
            "attention.head_count_kv": 1,
            "attention.key_length": config["kv_lora_rank"] + rotary,
            "attention.value_length": config["kv_lora_rank"],
            "attention.key_length_mla": nope + rotary,
            "attention.value_length_mla": value,
        }
    mscale = rope.get("mscale_all_dim")
    is_v2 = config["architectures"] == ["DeepseekV2ForCausalLM"]
    return {
        **sizes,
        "vocab_size": config["vocab_size"],
        "leading_dense_block_count": config["first_k_dense_replace"],
        "attention.q_lora_rank": config.get("q_lora_rank"),
        "attention.kv_lora_rank": config["kv_lora_rank"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_weights_norm": True if config.get("norm_topk_prob") else None,
        "expert_gating_func": None if is_v2 else 2,
        "rope.dimension_count": rotary,
        "rope.scaling.yarn_log_multiplier": None if mscale is None else 0.1 * mscale,
    }


def _deepseek32_keys(config: dict, head_dim: int, rope: dict, *_: Any) -> dict[str, Any]:
    return {
        **_deepseek2_keys(config, head_dim, rope, True),
        "attention.indexer.head_count": config["index_n_heads"],
        "attention.indexer.key_length": config["index_head_dim"],
        "attention.indexer.top_k": config["index_topk"],
    }


def _glm_dsa_keys(config: dict, head_dim: int, rope: dict, *_: Any) -> dict[str, Any]:
    config = {"first_k_dense_replace": config["mlp_layer_types"].count("dense")} | config
    types = [kind == "full" for kind in config["indexer_types"]]
    return {**_deepseek32_keys(config, head_dim, rope), "attention.indexer.types": types}


def _mistral4_keys(config: dict, head_dim: int, rope: dict, *_: Any) -> dict[str, Any]:
    return {**_deepseek2_keys(config, head_dim, rope, True), "expert_gating_func": None}


def _afmoe_keys(config: dict, head_dim: int, *_: Any) -> dict[str, Any]:
    return {
        **_llama_keys(config, head_dim),
        "expert_shared_count": config["num_shared_experts"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "leading_dense_block_count": config["num_dense_layers"],
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "expert_weights_scale": config["route_scale"],
        "attention.sliding_window": config["sliding_window"],
    }


def _mellum_keys(config: dict, *_: Any) -> dict[str, Any]:
    return {**_qwen3moe_keys(config), **_olmo2_keys(config)}


def _exaone_moe_keys(config: dict, *_: Any) -> dict[str, Any]:
    width = config["moe_intermediate_size"] * config["num_shared_experts"]
    shared = {"expert_shared_feed_forward_length": width, "rope.scaling.type": "none"}
    dense = {"first_k_dense_replace": config["mlp_layer_types"].count("dense")}
    return {**_olmo2_keys(config), **_routed_keys(dense | config), "nextn_predict_layers": 0, **shared}


def _hy_v3_keys(config: dict, *_: Any) -> dict[str, Any]:
    return {
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_feed_forward_length": config["moe_intermediate_size"] * config["num_shared_experts"],
        "expert_weights_norm": True,
        "expert_weights_scale": config["router_scaling_factor"],
        "expert_gating_func": 2,
    }


def _kimi_linear_keys(config: dict, head_dim: int, rope: dict, *_: Any) -> dict[str, Any]:
    shared = {"n_shared_experts": config.get("num_shared_experts", config.get("n_shared_experts"))}
    return {
        **_deepseek2_keys(config | shared, head_dim, rope, True),
        "expert_used_count": config.get("num_experts_per_tok", config.get("num_experts_per_token")),
        "expert_weights_norm": None,
        "attention.value_length": None,
        "attention.head_count_kv": [int(kind == "full_attention") for kind in config["layer_types"]],
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "kda.head_dim": config["linear_head_dim"],
    }


def _bailingmoe3_keys(config: dict, head_dim: int, rope: dict, *_: Any) -> dict[str, Any]:
    limits = {"swiglu_clamp_exp": "expert_swiglu_limit_list", "swiglu_clamp_shexp": "share_expert_swiglu_limit_list"}
    return {
        **_kimi_linear_keys(config | {"linear_conv_kernel_dim": config["short_conv_kernel_size"]}, head_dim, rope),
        "expert_weights_norm": config.get("norm_topk_prob", config.get("moe_renormalize")),
        "expert_shared_feed_forward_length": config["moe_intermediate_size"],
        "expert_group_count": config.get("n_group", config.get("num_expert_group")),
        "kda.safe_gate": True,
        "kda.gate_lower_bound": config["kda_lower_bound"],
        **{key: [float(limit or 0) for limit in config[name]] for key, name in limits.items()},
    }


def _minicpm3_keys(config: dict, *_: Any) -> dict[str, Any]:
    return {
        "vocab_size": config["vocab_size"],
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": config["kv_lora_rank"],
        "attention.key_length": config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
        "attention.value_length": None,
        "rope.dimension_count": config["qk_rope_head_dim"],
    }


def _granite_swa_keys(config: dict, head_dim: int, rope: dict, *_: Any) -> dict[str, Any]:
    kinds = config.get("layer_types") or [
        "sliding_attention" if i % 4 else "full_attention" for i in range(config["num_hidden_layers"])
    ]
    return {
        **_granite_keys(config, head_dim, rope),
        **_olmo2_keys(config | {"layer_types": kinds}),
        "rope.freq_base": max(config["layer_rope_theta"]),
        "attention.rope_pattern": [theta != 0 for theta in config["layer_rope_theta"]],
    }


def _cohere2moe_keys(config: dict, head_dim: int, rope: dict, *_: Any) -> dict[str, Any]:
    return {
        **_olmo2_keys(config),
        **_cohere_keys(config),
        "vocab_size": config["vocab_size"],
        "feed_forward_length": config["prefix_dense_intermediate_size"],
        "expert_feed_forward_length": config["intermediate_size"],
        "leading_dense_block_count": config["mlp_layer_types"].count("dense"),
        "expert_weights_norm": config["norm_topk_prob"],
        "expert_shared_count": config["num_shared_experts"],
        "expert_shared_feed_forward_length": config["intermediate_size"] * config["num_shared_experts"],
        "expert_gating_func": {"softmax": 1, "sigmoid": 2}[config["expert_selection_fn"]],
        "rope.dimension_count": head_dim,
    }


def _hrm_text_keys(config: dict, head_dim: int, *_: Any) -> dict[str, Any]:
    high, low = config["H_cycles"], config["L_cycles"]
    layers = config.get("num_layers_per_stack") or config["num_hidden_layers"]
    return {
        "block_count": layers * high * (low + 1),
        "rope.dimension_count": head_dim,
        "embedding_scale": config["embedding_scale"],
        **{"hrm.layers_per_stack": layers, "hrm.h_cycles": high, "hrm.l_cycles": low, "hrm.prefix_lm": False},
    }


def _of_hrm(config: dict, tensors: Tensors) -> Tensors:
    """The upper stack's layers after the lower one's, packed projections apart."""
    size = config.get("num_layers_per_stack") or config["num_hidden_layers"]
    found: Tensors = {}
    for name, tensor in tensors.items():
        if (match := re.fullmatch(r"model\.([LH])_module\.layers\.(\d+)\.(attn\.|)(.*)", name)) is None:
            found[name] = tensor
            continue
        prefix = f"model.layers.{int(match[2]) + size * (match[1] == 'H')}.{match[3] and 'self_attn.'}"
        if packed := {"gqkv_proj.weight": "gqkv", "mlp.gate_up_proj.weight": "gu"}.get(match[4]):
            names = {"g": "self_attn.gate_proj" if packed == "gqkv" else "mlp.gate_proj", "u": "mlp.up_proj"}
            for part, rows in zip(packed, np.split(tensor, len(packed)), strict=True):
                own = names.get(part, f"self_attn.{part}_proj")
                found[f"{prefix.removesuffix('self_attn.')}{own}.weight"] = rows
        else:
            found[prefix + match[4]] = tensor
    return found


def _llama4_keys(config: dict, head_dim: int, *_: Any) -> dict[str, Any]:
    return {
        **_llama_keys(config, head_dim),
        "feed_forward_length": config["intermediate_size_mlp"],
        "expert_feed_forward_length": config["intermediate_size"],
        "interleave_moe_layer_step": config["interleave_moe_layer_step"],
    }


def _mistral3_keys(config: dict, head_dim: int, rope: dict, *_: Any) -> dict[str, Any]:
    return {
        **_llama_keys(config, head_dim),
        "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
        "attention.temperature_scale": rope["llama_4_scaling_beta"],
    }


def _minimax_m2_keys(config: dict, head_dim: int, rope: dict, *_: Any) -> dict[str, Any]:
    return {
        "expert_feed_forward_length": config["intermediate_size"],
        "rope.dimension_count": int(head_dim * rope["partial_rotary_factor"]),
        "expert_gating_func": 2,
    }


def _minimax_m3_keys(config: dict, head_dim: int, rope: dict, *_: Any) -> dict[str, Any]:
    return {
        **_minimax_m2_keys(config, head_dim, rope),
        "feed_forward_length": config["dense_intermediate_size"],
        "leading_dense_block_count": config["mlp_layer_types"].count("dense"),
        "expert_shared_count": 1,
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_weights_norm": True,
        "attention.indexer.head_count": config["index_n_heads"],
        "attention.indexer.key_length": config["index_head_dim"],
        "attention.indexer.top_k": config["index_topk_blocks"],
        "attention.indexer.block_size": config["index_block_size"],
        "attention.indexer.local_blocks": 1,
    }


def _qwen35_keys(config: dict, head_dim: int, rope: dict, *_: Any) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": config["linear_num_value_heads"],
        "ssm.inner_size": config["linear_value_head_dim"] * config["linear_num_value_heads"],
        "full_attention_interval": 1 + config["layer_types"].index("full_attention"),
        "rope.dimension_count": int(head_dim * rope["partial_rotary_factor"]),
        "rope.dimension_sections": [11, 11, 10, 0],
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
    }


def _lfm2_keys(config: dict, *_: Any) -> dict[str, Any]:
    is_dense = "num_experts" not in config
    width = int(2 * config["intermediate_size"] / 3) if is_dense and config["block_auto_adjust_ff_dim"] else None
    multiple = config.get("block_multiple_of", 1)
    return {
        "attention.head_count_kv": [
            config["num_key_value_heads"] if kind == "full_attention" else 0 for kind in config["layer_types"]
        ],
        "attention.layer_norm_rms_epsilon": config["norm_eps"],
        "shortconv.l_cache": config["conv_L_cache"],
        "vocab_size": config["vocab_size"],
        "feed_forward_length": config["intermediate_size"] if width is None else -(-width // multiple) * multiple,
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "leading_dense_block_count": config.get("num_dense_layers"),
        "expert_gating_func": None if is_dense else 2,
    }


def _partial_rope(config: dict, head_dim: int, rope: dict, *_: Any) -> dict[str, Any]:
    parallel = config.get("use_parallel_residual")
    return {
        "rope.dimension_count": int(rope["partial_rotary_factor"] * head_dim),
        "use_parallel_residual": parallel,
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps"),
    }


def _four_times(config: dict, *_: Any) -> dict[str, Any]:
    """Of families whose blocks are four times as wide as the model where config.json does not say."""
    return {"feed_forward_length": config.get("intermediate_size") or 4 * config["hidden_size"]}


def _starcoder_keys(config: dict, *_: Any) -> dict[str, Any]:
    return {**_four_times(config), "attention.head_count_kv": 1}


def _falcon_keys(config: dict, *_: Any) -> dict[str, Any]:
    kv_heads = config["num_key_value_heads"] if config["new_decoder_architecture"] else 1
    return {**_four_times(config), "attention.head_count_kv": kv_heads, "tensor_data_layout": "jploski"}


def _mpt_keys(config: dict, *_: Any) -> dict[str, Any]:
    attention = config["attn_config"]
    biases = {"attention.max_alibi_bias": float(attention["alibi_bias_max"])}
    return {**_four_times(config), **biases, "attention.clamp_kqv": attention["clip_qkv"]}


def _exaone_keys(config: dict, *_: Any) -> dict[str, Any]:
    return {
        "attention.layer_norm_epsilon": None,
        "attention.layer_norm_rms_epsilon": config.get("layer_norm_epsilon", config.get("rms_norm_eps")),
        "rope.dimension_count": config["hidden_size"] // config["num_attention_heads"],
    }


def _exaone4_keys(config: dict, *_: Any) -> dict[str, Any]:
    return _olmo2_keys(config) if config.get("sliding_window") else {}


def _qwen2moe_keys(config: dict, *_: Any) -> dict[str, Any]:
    return {
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_feed_forward_length": config["shared_expert_intermediate_size"],
    }


def _hunyuan_keys(config: dict, head_dim: int, rope: dict, *_: Any) -> dict[str, Any]:
    return {
        "rope.freq_base": rope["rope_theta"] * rope["alpha"] ** (head_dim / (head_dim - 2)),
        "rope.scaling.type": "none",
        "rope.scaling.factor": 1.0,
        "rope.scaling.original_context_length": 256 * 1024,
    }


def _hunyuan_moe_keys(config: dict, head_dim: int, rope: dict, *_: Any) -> dict[str, Any]:
    return {
        **_hunyuan_keys(config, head_dim, rope),
        "expert_feed_forward_length": config["intermediate_size"],
        "expert_shared_feed_forward_length": config["intermediate_size"],
        "expert_used_count": config["moe_topk"],
        "expert_shared_count": 1,
    }


def _olmo_keys(config: dict, *_: Any) -> dict[str, Any]:
    return {"attention.layer_norm_epsilon": 1e-5, "attention.clamp_kqv": config["clip_qkv"]}


def _routed_keys(config: dict, *_: Any) -> dict[str, Any]:
    """Of DeepSeek V3's routing."""
    return {
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config.get("n_shared_experts") or config["num_shared_experts"],
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_gating_func": 2,
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_weights_norm": config["norm_topk_prob"],
    }


def _bailingmoe2_keys(config: dict, head_dim: int, rope: dict, *_: Any) -> dict[str, Any]:
    return {
        **_routed_keys(config),
        "expert_count": config["num_experts"],
        "expert_shared_feed_forward_length": config["moe_intermediate_size"] * config["num_shared_experts"],
        "rope.dimension_count": int(head_dim * rope["partial_rotary_factor"]),
        "nextn_predict_layers": config["num_nextn_predict_layers"],
    }


def _ernie4_5_moe_keys(config: dict, *_: Any) -> dict[str, Any]:
    return {
        "expert_count": config["moe_num_experts"],
        "expert_used_count": config["moe_k"],
        "interleave_moe_layer_step": config["moe_layer_interval"],
        "leading_dense_block_count": config["moe_layer_start_index"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["moe_num_shared_experts"],
        "expert_shared_feed_forward_length": config["intermediate_size"] // config["num_key_value_heads"],
    }


def _granitemoe_keys(config: dict, head_dim: int, *_: Any) -> dict[str, Any]:
    return {
        **_granite_keys(config, head_dim),
        "expert_shared_feed_forward_length": config.get("shared_intermediate_size") or None,
    }


def _gemma3n_keys(config: dict, head_dim: int, *_: Any) -> dict[str, Any]:
    return {
        **_gemma3_keys(config),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "altup.active_idx": config["altup_active_idx"],
        "altup.num_inputs": config["altup_num_inputs"],
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "attention.shared_kv_layers": config["num_kv_shared_layers"],
        "activation_sparsity_scale": [
            torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(share)).item()
            for share in config["activation_sparsity_pattern"]
        ],
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config["layer_types"]],
        "rope.freq_base_swa": config["rope_parameters"]["sliding_attention"]["rope_theta"],
    }


def _gemma4_keys(config: dict, head_dim: int, *_: Any) -> dict[str, Any]:
    layers, shared = config["num_hidden_layers"], config["num_kv_shared_layers"]
    full_layer = config["layer_types"].index("full_attention")
    of_full = config["per_layer_config"][str(full_layer)]
    full_dim = of_full["head_dim"]
    width = config["intermediate_size"]
    is_wide, full_heads = config["use_double_wide_mlp"], of_full.get("num_key_value_heads")
    local_heads = config["num_key_value_heads"]
    return {
        **_gemma3_keys(config),
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config["layer_types"]],
        "attention.key_length": full_dim,
        "attention.value_length": full_dim,
        "attention.key_length_swa": head_dim,
        "attention.value_length_swa": head_dim,
        "expert_count": config["num_experts"],
        "expert_used_count": config["top_k_experts"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "feed_forward_length": [width if i < layers - shared else 2 * width for i in range(layers)]
        if is_wide
        else width,
        "attention.head_count_kv": local_heads
        if full_heads is None
        else [local_heads if kind == "sliding_attention" else full_heads for kind in config["layer_types"]],
        "rope.dimension_count": full_dim,
        "rope.dimension_count_swa": head_dim,
        "rope.freq_base_swa": config["rope_parameters"]["sliding_attention"]["rope_theta"],
    }


def _qwen3next_keys(config: dict, head_dim: int, rope: dict, *_: Any) -> dict[str, Any]:
    keys = _qwen35_keys(config, head_dim, rope)
    del keys["rope.dimension_sections"]
    return keys


_NO_HEADS = {
    **{"context_length": 1 << 20, "feed_forward_length": 0, "attention.head_count": 0},
    **dict.fromkeys(("attention.head_count_kv", "attention.key_length", "attention.value_length")),
    "attention.layer_norm_epsilon": None,
}


def _mamba_keys(config: dict, *_: Any) -> dict[str, Any]:
    return {
        **_NO_HEADS,
        "attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"],
        "ssm.conv_kernel": config["conv_kernel"],
        "ssm.inner_size": config["intermediate_size"],
        "ssm.state_size": config["state_size"],
        "ssm.time_step_rank": config["time_step_rank"],
        "ssm.dt_b_c_rms": config["model_type"] == "falcon_mamba",
    }


def _mamba2_keys(config: dict, *_: Any) -> dict[str, Any]:
    return {
        **_NO_HEADS,
        "attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"],
        "ssm.conv_kernel": config["conv_kernel"],
        "ssm.inner_size": config["num_heads"] * config["head_dim"],
        "ssm.state_size": config["state_size"],
        "ssm.time_step_rank": config["num_heads"],
        "ssm.group_count": config["n_groups"],
    }


def _jamba_keys(config: dict, *_: Any) -> dict[str, Any]:
    period, offset = config["attn_layer_period"], config["attn_layer_offset"]
    return {
        "attention.head_count_kv": [
            config["num_key_value_heads"] if i % period == offset else 0 for i in range(config["num_hidden_layers"])
        ],
        "attention.key_length": None,
        "attention.value_length": None,
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.inner_size": config["mamba_expand"] * config["hidden_size"],
        "ssm.state_size": config["mamba_d_state"],
        "ssm.time_step_rank": config["mamba_dt_rank"],
    }


def _mamba2_keys_with_prefix(config: dict) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.inner_size": config["mamba_n_heads"] * config["mamba_d_head"],
        "ssm.state_size": config["mamba_d_state"],
        "ssm.time_step_rank": config["mamba_n_heads"],
        "ssm.group_count": config["mamba_n_groups"],
    }


def _granitehybrid_keys(config: dict, head_dim: int, *_: Any) -> dict[str, Any]:
    return {
        **_granitemoe_keys(config, head_dim),
        **_mamba2_keys_with_prefix(config),
        "expert_used_count": config["num_experts_per_tok"] or None,
        "context_length": 1 << 20,
        "rope.scaling.finetuned": False,
        "attention.head_count_kv": [
            config["num_key_value_heads"] if kind in ("attention", "full_attention") else 0
            for kind in config["layer_types"]
        ],
    }


def _falcon_h1_keys(config: dict, *_: Any) -> dict[str, Any]:
    return {**_mamba2_keys_with_prefix(config), "vocab_size": config["vocab_size"]}


def _nemotron_h_keys(config: dict, head_dim: int, *_: Any) -> dict[str, Any]:
    kinds = config["layers_block_type"]
    has_experts = "moe" in kinds
    of_experts = {
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": config.get("moe_shared_expert_intermediate_size"),
        "expert_shared_count": config.get("n_shared_experts"),
        "expert_weights_norm": config.get("norm_topk_prob"),
        "expert_weights_scale": config.get("routed_scaling_factor"),
        "moe_latent_size": config.get("moe_latent_size"),
    }
    width = config["moe_intermediate_size"] if has_experts else config["intermediate_size"]
    return {
        **(of_experts if has_experts else {}),
        "context_length": 1 << 20,
        "attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"],
        "rope.dimension_count": config["hidden_size"] // config["num_attention_heads"],
        "rope.freq_base": 10_000.0,
        "rope.scaling.finetuned": False,
        "attention.head_count_kv": [
            config["num_key_value_heads"] if kind in ("attention", "full_attention") else 0 for kind in kinds
        ],
        "feed_forward_length": [width if kind in ("moe", "mlp") else 0 for kind in kinds],
        "ssm.conv_kernel": config["conv_kernel"],
        "ssm.inner_size": config["mamba_num_heads"] * config["mamba_head_dim"],
        "ssm.state_size": config["ssm_state_size"],
        "ssm.time_step_rank": config["mamba_num_heads"],
        "ssm.group_count": config["n_groups"],
    }


def _no_keys(*_: Any) -> dict[str, Any]:
    return {}


_SPECIAL_KEYS_OF_CLASSICS = {
    "gpt2": _four_times,
    "starcoder": _starcoder_keys,
    "gptneox": _partial_rope,
    "falcon": _falcon_keys,
    "bloom": _four_times,
    "mpt": _mpt_keys,
    "phi2": _partial_rope,
    "stablelm": _partial_rope,
    "gemma": _no_keys,
    "internlm2": _no_keys,
    "exaone": _exaone_keys,
    "nemotron": _partial_rope,
    "chatglm": _partial_rope,
}
_SPECIAL_KEYS = {
    **_SPECIAL_KEYS_OF_CLASSICS,
    "llama": _llama_keys,
    "granite": _granite_keys,
    "qwen2": _no_keys,
    "qwen3": _no_keys,
    "qwen3moe": _qwen3moe_keys,
    "qwen2vl": _qwen_vl_keys,
    "qwen3vl": _qwen3vl_keys,
    "phi3": _phi3_keys,
    "olmo2": _olmo2_keys,
    "gpt-oss": _gpt_oss_keys,
    "starcoder2": _no_keys,
    "glm4": _glm4_keys,
    "glm4moe": _glm4moe_keys,
    "gemma2": _gemma2_keys,
    "gemma3": _gemma3_keys,
    "command-r": _cohere_keys,
    "cohere2": _cohere2_keys,
    "deepseek2": _deepseek2_keys,
    "deepseek32": _deepseek32_keys,
    "glm-dsa": _glm_dsa_keys,
    "mistral4": _mistral4_keys,
    "afmoe": _afmoe_keys,
    "mellum": _mellum_keys,
    "exaone-moe": _exaone_moe_keys,
    "hy_v3": _hy_v3_keys,
    "kimi-linear": _kimi_linear_keys,
    "bailingmoe3": _bailingmoe3_keys,
    "minicpm3": _minicpm3_keys,
    "granite_swa": _granite_swa_keys,
    "cohere2moe": _cohere2moe_keys,
    "hrm_text": _hrm_text_keys,
    "llama4": _llama4_keys,
    "mistral3": _mistral3_keys,
    "smollm3": _llama_keys,
    "minimax-m2": _minimax_m2_keys,
    "minimax-m3": _minimax_m3_keys,
    "qwen35": _qwen35_keys,
    "qwen35moe": _qwen35_keys,
    "lfm2": _lfm2_keys,
    "lfm2moe": _lfm2_keys,
    "exaone4": _exaone4_keys,
    "olmoe": _no_keys,
    "qwen2moe": _qwen2moe_keys,
    "hunyuan-dense": _hunyuan_keys,
    "apertus": _llama_keys,
    "olmo": _olmo_keys,
    "dots1": _routed_keys,
    "bailingmoe2": _bailingmoe2_keys,
    "ernie4_5-moe": _ernie4_5_moe_keys,
    "hunyuan-moe": _hunyuan_moe_keys,
    "granitemoe": _granitemoe_keys,
    "phimoe": _phi3_keys,
    "gemma3n": _gemma3n_keys,
    "gemma4": _gemma4_keys,
    "qwen3next": _qwen3next_keys,
    "mamba": _mamba_keys,
    "mamba2": _mamba2_keys,
    "jamba": _jamba_keys,
    "granitehybrid": _granitehybrid_keys,
    "falcon-h1": _falcon_h1_keys,
    "nemotron_h": _nemotron_h_keys,
    "nemotron_h_moe": _nemotron_h_keys,
}


def _tensors(config: dict, architecture: str, tensors: Tensors, separate_latent_heads: bool) -> Tensors:
    """Tensors as `modify_tensors` changes them, by their names in the file."""
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads")
    if architecture == "jamba":
        tensors = {name.replace(".feed_forward.experts.", ".mlp.experts."): tensor for name, tensor in tensors.items()}
    if architecture.startswith("nemotron_h"):
        pattern = re.compile(r"^backbone\.(layers\.\d+)\.mixer\.experts\.")
        tensors = {pattern.sub(r"model.\1.mlp.experts.", name): tensor for name, tensor in tensors.items()}
    if architecture == "minimax-m3":
        tensors = {_m3_name(name): t + 1 if name.endswith("norm.weight") else t for name, t in tensors.items()}
    tensors = _stacked_experts(_split_fused_experts(tensors, architecture))
    tensors = _split_granite_blocks(tensors)
    if config.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    if architecture in _PERMUTED:
        for name in tensors:
            if re.search(r"\.[qk]_proj\.(weight|bias)$", name):
                tensors[name] = _permute(tensors[name], kv_heads if ".k_proj" in name else heads)
    if architecture in _SPECIAL_KEYS_OF_CLASSICS:
        tensors = _of_classic(config, architecture, tensors)
    if architecture == "qwen3next":
        tensors = {
            name: _unchanged_heads(name, tensor) for name, tensor in _unpacked_delta_net(config, tensors).items()
        }
    if architecture in ("mamba", "mamba2", "jamba", "granitehybrid", "falcon-h1", "nemotron_h", "nemotron_h_moe"):
        tensors = _of_mamba(config, architecture, tensors)
    if architecture == "gemma3n":
        tensors = _stacked_projections(tensors)
    if architecture in ("gemma", "gemma2", "gemma3", "gemma-embedding", "nemotron"):
        tensors = {name: t + 1 if name.endswith("norm.weight") else t for name, t in tensors.items()}
    if architecture.startswith("qwen35"):
        tensors = {name: _of_delta_net(config, name, tensor) for name, tensor in tensors.items()}
    if architecture.startswith("lfm2"):
        tensors = {name: t.squeeze(1) if "conv.conv" in name else t for name, t in tensors.items()}
    if "kv_lora_rank" in config and architecture != "minicpm3" and separate_latent_heads:
        tensors = _separate_latent_heads(config, tensors)
    if architecture == "bailingmoe3":
        latent = {name.rpartition(".kv_a_proj")[0] for name in tensors if ".kv_a_proj" in name}
        tensors = {_ling_name(name, latent): tensor for name, tensor in tensors.items()}
    if architecture in ("kimi-linear", "bailingmoe3"):
        sign = 1 if architecture == "bailingmoe3" else -1
        tensors = {name: _of_delta_attention(name, tensor, sign) for name, tensor in tensors.items()}
    if architecture == "hrm_text":
        tensors = _of_hrm(config, tensors)
    names = gguf.get_tensor_name_map(_architecture_id(architecture), config["num_hidden_layers"])
    found: Tensors = {}
    for name, tensor in tensors.items():
        if match := re.fullmatch(r"model\.layers\.(\d+)\.self_attn\.index_(.*)", name):
            found[f"blk.{match[1]}.indexer.{match[2]}"] = tensor
            continue
        if name == "model.z_L_init" or name.startswith("blk."):
            found["hrm.z_l_init" if name.startswith("model.") else name] = tensor
            continue
        name = re.sub(r"e_score_correction_bias$", "e_score_correction.bias", name)
        name = re.sub(r"expert_bias$", "expert_bias.bias", re.sub(r"\.dt_bias$", ".dt_proj.bias", name))
        name = f"{name}.weight" if name.endswith(("sinks", "layer_scalar", "output_scale")) else name
        name = re.sub(r"router\.scale$", "router.proj.scale", name)
        name = name.replace(".attn_sub_norm.", ".inner_attn_ln.").replace(".ffn_sub_norm.", ".ffn_layernorm.")
        name = re.sub(r"router\.per_expert_scale$", "experts.down_proj.scale", name)
        mapped = names.get_name(name, try_suffixes=(".weight", ".bias", ".scale"))
        assert mapped is not None, name
        if architecture == "hy_v3":
            mapped = mapped.replace("exp_probs_b.bias", "exp_probs_b")
        found[mapped] = tensor
    return found | _rope_tensors(config)


def _m3_name(name: str) -> str:
    """Name as dots.llm1 has it, whose layers have tensors of the same names in files."""
    name = name.removeprefix("language_model.").replace(".block_sparse_moe.", ".mlp.")
    for number, projection in (("1", "gate"), ("2", "down"), ("3", "up")):
        name = name.replace(f".w{number}.", f".{projection}_proj.")
    return name.replace(".mlp.e_score_correction_bias", ".mlp.gate.e_score_correction_bias")


def _of_classic(config: dict, architecture: str, tensors: Tensors) -> Tensors:
    """GPT-2's weights turned, packed projections as all queries, all keys and all values, heads' norms in one."""
    heads, groups = config["num_attention_heads"], config.get("num_key_value_heads") or config["num_attention_heads"]
    if architecture == "falcon" and not config["new_decoder_architecture"]:
        groups = 1
    found: Tensors = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("transformer.") if architecture == "bloom" else name
        if architecture == "gpt2" and re.search(r"\.c_(attn|proj|fc)\.weight$", name):
            tensor = tensor.T
        if "query_key_value" in name or name.endswith(".wqkv.weight"):
            by_group = tensor.reshape(groups, heads // groups + 2, -1, *tensor.shape[1:])
            q, k, v = by_group[:, :-2], by_group[:, -2], by_group[:, -1]
            q, k, v = (part.reshape(-1, *tensor.shape[1:]) for part in (q, k, v))
            tensor = np.concatenate([q, k, v])
            if architecture == "internlm2":
                prefix = name.replace("attention.wqkv.weight", "self_attn.")
                found |= {f"{prefix}q_proj.weight": _permute(q, heads), f"{prefix}k_proj.weight": _permute(k, groups)}
                name, tensor = f"{prefix}v_proj.weight", v
        if match := re.fullmatch(r"(.*[qk]_layernorm)\.norms\.(\d+)\.weight", name):
            count = heads if "q_layernorm" in name else groups
            name, head = f"{match[1]}.weight", int(match[2])
            found.setdefault(name, np.zeros((count, *tensor.shape), np.float32))[head] = tensor
            continue
        found[name] = tensor
    return found


# Architectures that gguf-py does not have yet -> one with all of their tensors.
_ALIKE = {"minimax-m3": "dots1", "deepseek32": "glm-dsa", "mellum": "qwen3moe", "hy_v3": "dots1"}
_ALIKE |= {"bailingmoe3": "kimi-linear", "granite_swa": "mimo2", "cohere2moe": "dots1", "hrm_text": "afmoe"}


def _ling_name(name: str, latent: set[str]) -> str:
    """Name in the file of a gate or decay, whose tensor depends on the layer's kind; else as Kimi Linear has it."""
    own, _, rest = name.rpartition(".")
    layer, _, module = own.rpartition(".")
    if module in ("f_proj", "g_proj"):
        number = name.split(".")[2]
        return f"blk.{number}.{'attn_gate' if layer in latent else {'f': 'ssm_f_a', 'g': 'ssm_g_a'}[module[0]]}.{rest}"
    name = name.replace("model.word_embeddings", "model.embed_tokens").replace(".attention.", ".self_attn.")
    return name.replace(".dense.", ".o_proj.")


def _of_delta_attention(name: str, tensor: np.ndarray, sign: int) -> np.ndarray:
    if name.endswith("_conv1d.weight"):
        return tensor.reshape(1, len(tensor), 1, -1)
    if name.endswith(".A_log"):
        return sign * (np.exp(tensor) if sign < 0 else np.exp(tensor).reshape(-1, 1))
    return tensor


def _architecture_id(architecture: str) -> gguf.MODEL_ARCH:
    known = _ALIKE.get(architecture, architecture)
    return next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == known)


def _permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Row i of a head's first half and row i of its second become neighbours."""
    halves = rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:])
    return np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(rows.shape)


def _of_delta_net(config: dict, name: str, tensor: np.ndarray) -> np.ndarray:
    """Value heads in tiled order, A instead of its logarithm, norms with 1 added."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]

    def tiled(rows: np.ndarray, head_dim: int) -> np.ndarray:
        grouped = rows.reshape(keys, values // keys, head_dim, *rows.shape[1:])
        return grouped.swapaxes(0, 1).reshape(rows.shape)

    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return tensor + 1
    if re.search(r"in_proj_qkv|conv1d", name):
        tensor = tensor.squeeze(1) if tensor.ndim == 3 else tensor
        first = 2 * keys * key_dim
        return np.concatenate([tensor[:first], tiled(tensor[first:], value_dim)])
    if ".in_proj_z." in name:
        return tiled(tensor, value_dim)
    if re.search(r"\.in_proj_[ab]\.|\.dt_bias$", name):
        return tiled(tensor, 1)
    if name.endswith(".A_log"):
        return tiled(-np.exp(tensor), 1)
    return tiled(tensor.T, value_dim).T if ".linear_attn.out_proj." in name else tensor


def _of_mamba(config: dict, architecture: str, tensors: Tensors) -> Tensors:
    """A instead of its logarithm; of Mamba2, columns of one and norms by groups; Falcon-H1's multipliers in weights."""
    groups = config.get("n_groups", config.get("mamba_n_groups"))
    found: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith("conv1d.weight"):
            tensor = tensor.squeeze(1)
        if name.endswith(".A_log"):
            tensor = -np.exp(tensor)
        if groups and name.endswith((".A_log", ".D")):
            tensor = tensor[:, None]
        if groups and name.endswith((".mixer.norm.weight", ".mamba.norm.weight")):
            tensor = tensor.reshape(groups, -1)
        if architecture == "falcon-h1":
            tensor = tensor * _falcon_h1_multiplier(config, name)
        found[name] = tensor
    return found


def _falcon_h1_multiplier(config: dict, name: str) -> Any:
    gate, down = config["mlp_multipliers"]
    attention = config["attention_in_multiplier"]
    of_each = {
        **{"down_proj": down, "gate_proj": gate, "k_proj": config["key_multiplier"] * attention},
        **{"q_proj": attention, "v_proj": attention, "o_proj": config["attention_out_multiplier"]},
        **{"mamba.out_proj": config["ssm_out_multiplier"], "lm_head": config["lm_head_multiplier"]},
        "embed_tokens": config["embedding_multiplier"],
    }
    if name.endswith("in_proj.weight"):
        group = config["mamba_n_groups"] * config["mamba_d_state"]
        sizes = [config["mamba_d_ssm"], config["mamba_d_ssm"], group, group, config["mamba_n_heads"]]
        return config["ssm_in_multiplier"] * np.repeat(config["ssm_multipliers"], sizes)[:, None]
    return next((factor for part, factor in of_each.items() if part in name), 1.0)


def _unpacked_delta_net(config: dict, tensors: Tensors) -> Tensors:
    """Queries, keys, values and gates of each key head -> all queries, keys and values in one, all gates in another."""
    groups, key_dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values_dim = config["linear_num_value_heads"] // groups * config["linear_value_head_dim"]
    found: Tensors = {}
    for name, tensor in tensors.items():
        if ".in_proj_qkvz." in name:
            parts = np.split(
                tensor.reshape(groups, -1, tensor.shape[1]), np.cumsum([key_dim, key_dim, values_dim]), axis=1
            )
            q, k, v, z = (part.reshape(-1, tensor.shape[1]) for part in parts)
            found[name.replace("qkvz", "qkv")] = np.concatenate([q, k, v])
            found[name.replace("qkvz", "z")] = z
        else:
            found[name] = tensor
    return found


def _unchanged_heads(name: str, tensor: np.ndarray) -> np.ndarray:
    """A instead of its logarithm, norms with 1 added; value heads stay in their order."""
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return tensor + 1
    if name.endswith(".A_log"):
        return -np.exp(tensor)
    return tensor.squeeze(1) if name.endswith("conv1d.weight") else tensor


def _stacked_projections(tensors: Tensors) -> Tensors:
    """Gemma 3n's projections of further states in one tensor each, and all tables of as many rows."""
    found = {name: tensor for name, tensor in tensors.items() if "altup" not in name.split(".")[1]}
    for each in ("altup_projections", "altup_unembed_projections"):
        members = [name for name in tensors if name.startswith(f"model.{each}.")]
        found[f"model.{each}.weight"] = np.stack([tensors[name] for name in sorted(members)])
    rows = len(found["model.embed_tokens.weight"])
    table = found["model.embed_tokens_per_layer.weight"]
    found["model.embed_tokens_per_layer.weight"] = np.pad(table, ((0, rows - len(table)), (0, 0)))
    return found


def _split_fused_experts(tensors: Tensors, architecture: str) -> Tensors:
    """Stacks of experts with gate and up in one -> [X, out, in] each; GPT-OSS interleaves the two.

    GPT-OSS and Llama 4 have [X, in, out], Qwen 3.5 [X, out, in].
    """
    found: Tensors = {}
    if architecture in ("gemma4", "mistral4"):  # whose files have gate and up in one as well
        return {f"{name}.weight" if ".experts." in name else name: tensor for name, tensor in tensors.items()}
    is_turned = not architecture.startswith("qwen35")
    for name, tensor in tensors.items():
        if ".experts.gate_up_proj" in name:
            outputs_last = tensor.swapaxes(-1, -2) if is_turned and not name.endswith("_bias") else tensor
            axis = outputs_last.ndim - 1 if name.endswith("_bias") else 1
            if architecture == "gpt-oss":
                gate, up = (np.take(outputs_last, np.arange(i, outputs_last.shape[axis], 2), axis) for i in (0, 1))
            else:
                gate, up = np.split(outputs_last, 2, axis)
            suffix = "bias" if name.endswith("_bias") else "weight"
            base = name.split(".gate_up_proj")[0]
            found |= {f"{base}.gate_proj.{suffix}": gate, f"{base}.up_proj.{suffix}": up}
        elif name.endswith(".experts.down_proj"):
            found[f"{name}.weight"] = tensor.swapaxes(-1, -2) if is_turned else tensor
        elif name.endswith(".experts.down_proj_bias"):
            found[name.replace("_bias", ".bias")] = tensor
        else:
            found[name] = tensor
    return found


def _stacked_experts(tensors: Tensors) -> Tensors:
    """One tensor an expert -> one of all experts."""
    found: Tensors = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in tensors.items():
        if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name):
            stacks.setdefault(f"{match[1]}.{match[3]}.weight", {})[int(match[2])] = tensor
        else:
            found[name] = tensor
    for name, stack in stacks.items():
        name = re.sub(r"model\.(layers\.\d+)\.(block_sparse_moe|feed_forward)", r"\1.feed_forward", name)
        found[name] = np.stack([stack[i] for i in range(len(stack))])
    return found


def _split_granite_blocks(tensors: Tensors) -> Tensors:
    """Granite's projections with gate and up in one, of all experts or of the block that every token goes through."""
    found: Tensors = {}
    block = "mlp.shared_expert" if any(".block_sparse_moe." in name for name in tensors) else "mlp"
    for name, tensor in tensors.items():
        layer, _, rest = name.partition(".block_sparse_moe.")
        if rest == "input_linear.weight":
            gate, up = np.split(tensor, 2, axis=1)
            found |= {f"{layer}.mlp.experts.gate_proj.weight": gate, f"{layer}.mlp.experts.up_proj.weight": up}
        elif rest == "output_linear.weight":
            found[f"{layer}.mlp.experts.down_proj.weight"] = tensor
        elif name.endswith(".shared_mlp.input_linear.weight"):
            base = name.removesuffix(".shared_mlp.input_linear.weight")
            for each, part in zip(("gate", "up"), np.split(tensor, 2), strict=True):
                found[f"{base}.{block}.{each}_proj.weight"] = part
        else:
            found[name.replace("shared_mlp.output_linear", f"{block}.down_proj")] = tensor
    return found


def _separate_latent_heads(config: dict, tensors: Tensors) -> Tensors:
    found: Tensors = {}
    nope = config["qk_nope_head_dim"]
    for name, tensor in tensors.items():
        if not name.endswith("kv_b_proj.weight"):
            found[name] = tensor
            continue
        heads = tensor.reshape(config["num_attention_heads"], -1, tensor.shape[1])
        found[name.replace("kv_b", "k_b")] = heads[:, :nope].transpose(0, 2, 1)
        found[name.replace("kv_b", "v_b")] = heads[:, nope:]
    return found


def _rope_tensors(config: dict) -> Tensors:
    """The divisors of frequencies that llama.cpp keeps as tensors."""
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    if rope.get("rope_type") == "proportional":
        dim = next(iter(config["per_layer_config"].values()))["head_dim"]
        rotated = int(dim * rope["partial_rotary_factor"] / 2)
        return {"rope_freqs.weight": np.asarray([1.0] * rotated + [1e30] * (dim // 2 - rotated))}
    if rope.get("rope_type") == "longrope":
        return {
            "rope_factors_long.weight": np.asarray(rope["long_factor"]),
            "rope_factors_short.weight": np.asarray(rope["short_factor"]),
        }
    if rope.get("rope_type") != "llama3":
        return {}
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    frequencies = 1.0 / rope["rope_theta"] ** (np.arange(0, dim, 2, dtype=np.float32) / dim)
    original, low, high = (
        rope[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    divisors = []
    for frequency in frequencies:
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(rope["factor"])
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return {"rope_freqs.weight": np.asarray(divisors)}
