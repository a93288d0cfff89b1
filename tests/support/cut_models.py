"""Published models cut to a few layers, one of each kind where a family has two: real layers, compiled quickly."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jaxis.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.quantization.arguments import parse_quantization
from jaxis.quantization.checkpoint_formats import quantization_of_checkpoint
from tests.support.published_models import read

NUM_LAYERS = 2
MAX_MODEL_LEN = 4096
MAX_NUM_SEQS = 64

_FILES = {"mistral-7b": "mistral-7b-v0.1"}
# What makes the second layer differ from the first, or both from what most layers are.
_CHANGES: dict[str, dict[str, Any]] = {
    "gemma-3-1b": {"sliding_window_pattern": 2},
    # Two layers with keys and values of their own, and two that attend to those.
    "gemma-4-e2b": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma-4-26b-a4b": {"layer_types": ["sliding_attention", "full_attention"]},
    "command-r7b": {"sliding_window_pattern": 2},
    "olmo-3-7b": {"layer_types": ["sliding_attention", "full_attention"]},
    "gpt-oss-20b": {"layer_types": ["sliding_attention", "full_attention"]},
    "gpt-oss-120b": {"layer_types": ["sliding_attention", "full_attention"]},
    "llama-4-scout": {"no_rope_layers": [1, 0]},
    "deepseek-v3": {"first_k_dense_replace": 1},
    "deepseek-v2.5": {"first_k_dense_replace": 1},
    "kimi-k2": {"first_k_dense_replace": 1},
    "glm-4.5": {"first_k_dense_replace": 1},
}


def cut_config(name: str) -> dict[str, Any]:
    """The config.json of a published model, with NUM_LAYERS layers."""
    values = read(_FILES.get(name, name))
    text_config = values.get("text_config", values)
    text_config |= {"num_hidden_layers": NUM_LAYERS} | _CHANGES.get(name, {})
    return values


def cut_model(
    name: str, num_devices: int = 1, *, quantization: str | None = None, cache_bytes: int = 1 << 29
) -> VllmConfig:
    """The engine's configuration for a published model with NUM_LAYERS layers, on some devices.

    Args:
      name: Name of a config, such as "qwen3-8b".
      num_devices: Number that share each layer.
      quantization: "int8" or "int4" quantizes, "stored" is as the checkpoint is; None is bfloat16.
      cache_bytes: Memory of the KV cache, on each device.
    """
    values = cut_config(name)
    if quantization != "stored":
        values.pop("quantization_config", None)
    hf_config = HFConfig(values, source=name)
    choice = parse_quantization(None if quantization == "stored" else quantization)
    return VllmConfig(
        ModelConfig(name, hf_config, jnp.bfloat16, MAX_MODEL_LEN),
        CacheConfig(kv_cache_memory_bytes=cache_bytes * num_devices),
        SchedulerConfig(MAX_NUM_SEQS, 2048),
        ParallelConfig(num_devices),
        quant_config=quantization_of_checkpoint(hf_config, choice),
    )
