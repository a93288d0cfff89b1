"""A model's config as the keys of a GGUF file: the inverse of `jaxis.loading.gguf.config`.

Settings that llama.cpp has in its own code and not in keys are left out. Some configs cannot be expressed with keys;
`to_gguf.py` finds them by reading the keys back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from jaxis.bringup.convert.gguf_file import GGUFValue
from jaxis.config.hf_config import HFConfig
from jaxis.config.rope_config import RopeConfig, rope_config
from jaxis.errors import ConfigError
from jaxis.loading.gguf.names import ROPE_FACTORS_LONG, ROPE_FACTORS_SHORT, ROPE_FREQS
from jaxis.loading.gguf.rope_keys import llama3_divisors

Keys = dict[str, GGUFValue]
_SOFTMAX, _SIGMOID = 1, 2
# Architectures whose windows llama.cpp applies.
_WITH_WINDOWS = {"olmo2", "gpt-oss", "cohere2", "gemma2", "gemma3", "llama4"}
# Architectures whose projections can have biases in llama.cpp.
WITH_BIASES = {"llama", "granite", "qwen2", "glm4", "glm4moe", "starcoder2", "gpt-oss"}


@dataclass(frozen=True)
class ModelKeys:
    """A model's description in a GGUF file, under llama.cpp's name of its architecture, with notes for the user.

    Attributes:
      names: Entry of `jaxis.loading.gguf.architecture_names.NAMES`.
      tensors: Float32 tensors that describe what no key can.
    """

    architecture: str
    names: str
    keys: Keys
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def model_keys(config: HFConfig) -> ModelKeys:
    """Describes a text model with GGUF's keys. Raises ConfigError if llama.cpp's files cannot describe it."""
    model_type = config["model_type"]
    if model_type not in _FAMILIES:
        raise ConfigError(
            f"{config.source}: models of the type {model_type!r} cannot be written to GGUF; those that can: "
            f"{', '.join(sorted(_FAMILIES))}"
        )
    architecture, names, family = _FAMILIES[model_type]
    rope = rope_config(config, "full_attention")
    keys = family(config) | _rope_keys(config, rope)
    notes = []
    if model_type == "deepseek_v2" and config.get("n_group", 1) > 1:
        notes.append("llama.cpp chooses this model's groups of experts in another way, and gives other logits")
    if architecture not in _WITH_WINDOWS and config.get("sliding_window") is not None:
        notes.append(f"llama.cpp does not apply the sliding window of {config['sliding_window']} tokens to this model")
    return ModelKeys(architecture, names, keys, _rope_tensors(config, rope), tuple(notes))


def _head_dim(config: HFConfig) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _base(config: HFConfig) -> Keys:
    head_dim = _head_dim(config)
    return {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config.get("num_key_value_heads", config["num_attention_heads"]),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "vocab_size": config["vocab_size"],
        "feed_forward_length": config["intermediate_size"],
    }


def _rms(config: HFConfig) -> Keys:
    return {"attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"])}


def _llama(config: HFConfig) -> Keys:
    return _base(config) | _rms(config)


def _mistral(config: HFConfig) -> Keys:
    return _llama(config) | _window(config)


def _window(config: HFConfig) -> Keys:
    window = config.get("sliding_window")
    return {} if window is None else {"attention.sliding_window": window}


def _mixtral(config: HFConfig) -> Keys:
    return _mistral(config) | {
        "expert_count": config["num_local_experts"],
        "expert_used_count": config["num_experts_per_tok"],
    }


def _granite(config: HFConfig) -> Keys:
    return _llama(config) | {
        "embedding_scale": float(config["embedding_multiplier"]),
        "residual_scale": float(config["residual_multiplier"]),
        "attention.scale": float(config["attention_multiplier"]),
        "logit_scale": float(config["logits_scaling"]),
    }


def _qwen3_moe(config: HFConfig) -> Keys:
    return _llama(config) | {
        "expert_count": config.get("num_experts") or config["num_local_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_weights_norm": bool(config["norm_topk_prob"]),
    }


def _phi3(config: HFConfig) -> Keys:
    return _llama(config) | {
        "attention.sliding_window": config.get("sliding_window", 0),
        "rope.scaling.original_context_length": config["original_max_position_embeddings"],
    }


def _olmo3(config: HFConfig) -> Keys:
    local = rope_config(config, "sliding_attention")
    return _llama(config) | {
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": _is_sliding(config),
        "rope.freq_base_swa": local.theta,
    }


def _is_sliding(config: HFConfig) -> list[bool]:
    return [layer_type == "sliding_attention" for layer_type in config["layer_types"]]


def _gpt_oss(config: HFConfig) -> Keys:
    return _llama(config) | {
        "expert_count": config["num_local_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["intermediate_size"],
        "attention.sliding_window": config["sliding_window"],
    }


def _starcoder2(config: HFConfig) -> Keys:
    return _base(config) | _window(config) | {"attention.layer_norm_epsilon": float(config["norm_epsilon"])}


def _glm4_moe(config: HFConfig) -> Keys:
    return _llama(config) | _deepseek_experts(config) | {"expert_gating_func": _SIGMOID}


def _deepseek_experts(config: HFConfig) -> Keys:
    return {
        "expert_count": config["n_routed_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_shared_count": config.get("n_shared_experts", 0),
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_weights_norm": bool(config.get("norm_topk_prob", False)),
        "expert_group_count": config.get("n_group", 1),
        "expert_group_used_count": config.get("topk_group", 1),
    }


def _deepseek(config: HFConfig) -> Keys:
    rank, rope_dim = config["kv_lora_rank"], config["qk_rope_head_dim"]
    query_rank = config.get("q_lora_rank")
    return (
        _llama(config)
        | _deepseek_experts(config)
        | {
            # Attention to latents: one key-value head, whose key is a latent and a rotated part.
            "attention.head_count_kv": 1,
            "attention.key_length": rank + rope_dim,
            "attention.value_length": rank,
            "attention.key_length_mla": config["qk_nope_head_dim"] + rope_dim,
            "attention.value_length_mla": config["v_head_dim"],
            "attention.kv_lora_rank": rank,
            "expert_gating_func": _SOFTMAX if config["model_type"] == "deepseek_v2" else _SIGMOID,
        }
        | ({} if query_rank is None else {"attention.q_lora_rank": query_rank})
    )


def _cohere(config: HFConfig) -> Keys:
    return _base(config) | {
        "attention.layer_norm_epsilon": float(config["layer_norm_eps"]),
        "logit_scale": float(config["logit_scale"]),
    }


def _cohere2(config: HFConfig) -> Keys:
    return _cohere(config) | {"attention.sliding_window": config["sliding_window"]}


def _gemma2(config: HFConfig) -> Keys:
    keys = _llama(config) | {"attention.sliding_window": config["sliding_window"]}
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):  # both keys have the config's names
        if (cap := config.get(name)) is not None:
            keys[name] = float(cap)
    return keys


def _gemma3(config: HFConfig) -> Keys:
    return _gemma2(config) | {"rope.freq_base_swa": rope_config(config, "sliding_attention").theta}


def _llama4(config: HFConfig) -> Keys:
    layers, step = range(config["num_hidden_layers"]), config["interleave_moe_layer_step"]
    for name, expected in (
        ("moe_layers", [i for i in layers if (i + 1) % step == 0]),
        ("no_rope_layers", [int((i + 1) % 4 != 0) for i in layers]),
        ("layer_types", ["chunked_attention" if (i + 1) % 4 else "full_attention" for i in layers]),
    ):
        if config.get(name) not in (None, [], expected):
            raise ConfigError(f"{config.source}: GGUF has no key for {name}={config.get(name)}, only {expected}")
    return _llama(config) | {
        "feed_forward_length": config["intermediate_size_mlp"],
        "expert_feed_forward_length": config["intermediate_size"],
        "expert_count": config["num_local_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "interleave_moe_layer_step": config["interleave_moe_layer_step"],
    }


# model_type -> llama.cpp's architecture, the entry of NAMES, and what makes the keys.
_FAMILIES: Mapping[str, tuple[str, str, Callable[[HFConfig], Keys]]] = {
    "llama": ("llama", "llama", _llama),
    "mistral": ("llama", "llama", _mistral),
    "mixtral": ("llama", "mixtral", _mixtral),
    "granite": ("granite", "granite", _granite),
    "qwen2": ("qwen2", "qwen2", _llama),
    "qwen3": ("qwen3", "qwen3", _llama),
    "qwen3_moe": ("qwen3moe", "qwen3moe", _qwen3_moe),
    "phi3": ("phi3", "phi3", _phi3),
    "olmo2": ("olmo2", "olmo2", _llama),
    "olmo3": ("olmo2", "olmo2", _olmo3),
    "gpt_oss": ("gpt-oss", "gpt-oss", _gpt_oss),
    "starcoder2": ("starcoder2", "starcoder2", _starcoder2),
    "glm4": ("glm4", "glm4", _llama),
    "glm4_moe": ("glm4moe", "glm4moe", _glm4_moe),
    "cohere": ("command-r", "command-r", _cohere),
    "cohere2": ("cohere2", "cohere2", _cohere2),
    "gemma2": ("gemma2", "gemma2", _gemma2),
    "gemma3_text": ("gemma3", "gemma3", _gemma3),
    "deepseek_v2": ("deepseek2", "deepseek2", _deepseek),
    "deepseek_v3": ("deepseek2", "deepseek2", _deepseek),
    "llama4_text": ("llama4", "llama4", _llama4),
}


def _rope_keys(config: HFConfig, rope: RopeConfig) -> Keys:
    rotated = config.get("qk_rope_head_dim") or _head_dim(config)
    keys: Keys = {
        "rope.freq_base": rope.theta,
        "rope.dimension_count": int(rotated * rope.partial_rotary_factor),
    }
    if rope.rope_type == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope.factor or 1)}
    elif rope.rope_type == "yarn":
        keys |= _yarn_keys(config, rope)
    elif rope.rope_type == "longrope":
        keys["rope.scaling.original_context_length"] = rope.original_max_position_embeddings or 0
        keys["rope.scaling.attn_factor"] = _longrope_attention_factor(rope)
    elif rope.rope_type == "dynamic":
        raise ConfigError(f"{config.source}: GGUF has no key for a rope of the type 'dynamic'")
    return keys


def _yarn_keys(config: HFConfig, rope: RopeConfig) -> Keys:
    if rope.attention_factor is not None:
        raise ConfigError(f"{config.source}: GGUF has no key for the attention_factor of a yarn rope")
    keys: Keys = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(rope.factor or 1),
        "rope.scaling.original_context_length": rope.original_max_position_embeddings or 0,
        "rope.scaling.yarn_beta_fast": float(rope.beta_fast),
        "rope.scaling.yarn_beta_slow": float(rope.beta_slow),
    }
    if rope.mscale_all_dim is not None:
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * rope.mscale_all_dim
    return keys


def _longrope_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    factor, original = rope.factor or 1.0, rope.original_max_position_embeddings or 1
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def _rope_tensors(config: HFConfig, rope: RopeConfig) -> dict[str, np.ndarray]:
    if rope.rope_type == "longrope":
        return {
            ROPE_FACTORS_LONG: np.asarray(rope.long_factor, np.float32),
            ROPE_FACTORS_SHORT: np.asarray(rope.short_factor, np.float32),
        }
    if rope.rope_type == "llama3":
        low, high = rope.low_freq_factor or 1.0, rope.high_freq_factor or 1.0
        original = rope.original_max_position_embeddings or 1
        divisors = llama3_divisors(rope.theta, _head_dim(config), rope.factor or 1.0, low, high, original)
        return {ROPE_FREQS: divisors.astype(np.float32)}
    return {}
