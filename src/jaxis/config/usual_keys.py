"""Usual names and defaults of keys that config.json files of some model types name otherwise or omit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_GEMMA4_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}

# By `model_type`. Only keys that every model of the type needs: `transformers` is the reference for their values.
CONFIG_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    # The `text_config` of multimodal checkpoints.
    "gemma3_text": {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
    "olmoe": {"rms_norm_eps": 1e-5},
    "qwen3_vl_text": {"rope_theta": 500_000.0},
    "qwen3_vl_moe_text": {"rope_theta": 500_000.0, "norm_topk_prob": True},
    "gemma4_text": {"rope_parameters": _GEMMA4_ROPES},
    "gemma4_unified_text": {"rope_parameters": _GEMMA4_ROPES, "hidden_size_per_layer_input": 0},
}


_GPT2_KEYS = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "layer_norm_eps",
}

# By `model_type`: what its config.json calls a key that most families have -> the usual name, which readers use.
USUAL_KEYS: Mapping[str, Mapping[str, str]] = {
    "bloom": {
        "n_embed": "hidden_size",
        "n_head": "num_attention_heads",
        "n_layer": "num_hidden_layers",
        "seq_length": "max_position_embeddings",
        "layer_norm_epsilon": "layer_norm_eps",
    },
    "codegen": _GPT2_KEYS,
    "exaone": {
        "num_layers": "num_hidden_layers",
        "layer_norm_epsilon": "rms_norm_eps",
        "activation_function": "hidden_act",
    },
    "falcon": {
        "num_kv_heads": "num_key_value_heads",
        "ffn_hidden_size": "intermediate_size",
        "layer_norm_epsilon": "layer_norm_eps",
        "activation": "hidden_act",
        "n_head": "num_attention_heads",
        "n_layer": "num_hidden_layers",
    },
    "gpt2": _GPT2_KEYS,
    "gpt_bigcode": _GPT2_KEYS,
    "gpt_neo": {
        "num_heads": "num_attention_heads",
        "num_layers": "num_hidden_layers",
        "layer_norm_epsilon": "layer_norm_eps",
        "activation_function": "hidden_act",
    },
    "gpt_neox": {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
    "gptj": _GPT2_KEYS,
    "mpt": {
        "d_model": "hidden_size",
        "n_heads": "num_attention_heads",
        "n_layers": "num_hidden_layers",
        "max_seq_len": "max_position_embeddings",
        "layer_norm_epsilon": "layer_norm_eps",
    },
    "nomic_bert": {
        **_GPT2_KEYS,
        "rotary_emb_base": "rope_theta",
    },
    "opt": {"ffn_dim": "intermediate_size", "activation_function": "hidden_act"},
    "stablelm": {"rope_pct": "partial_rotary_factor", "norm_eps": "layer_norm_eps"},
}


def with_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a parsed config.json, or an object in one, under the usual names of keys (USUAL_KEYS).

    Missing keys are set to the defaults of its `model_type`. A key that stands there under both names keeps them.
    """
    model_type = values.get("model_type")
    if not isinstance(model_type, str):
        return dict(values)
    usual = USUAL_KEYS.get(model_type, {})
    named = {key if usual.get(key) in values else usual.get(key, key): value for key, value in values.items()}
    return {**CONFIG_DEFAULTS.get(model_type, {}), **named}
