"""Defaults of keys that published config.json files omit because transformers' config class supplies them."""

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


def with_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """A parsed config.json, or an object in one, with missing keys set to the defaults of its `model_type`."""
    model_type = values.get("model_type")
    defaults = CONFIG_DEFAULTS.get(model_type, {}) if isinstance(model_type, str) else {}
    return {**defaults, **values}
