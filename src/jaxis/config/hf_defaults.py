"""Defaults of keys that published config.json files omit because transformers' config class supplies them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
}


def with_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """A parsed config.json, or an object in one, with missing keys set to the defaults of its `model_type`."""
    model_type = values.get("model_type")
    defaults = CONFIG_DEFAULTS.get(model_type, {}) if isinstance(model_type, str) else {}
    return {**defaults, **values}
