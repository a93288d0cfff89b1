"""Scopes for making layers without a checkpoint."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx

from jaxis.config import ModelConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.layers.scope import LayerScope


def scope_of(
    config: dict[str, Any], *, dtype: Any = jnp.float32, quant_config: Any = None, prefix: str = ""
) -> LayerScope:
    """The scope of a layer in a model with this config.json."""
    vllm_config = VllmConfig(ModelConfig("", HFConfig(config), dtype=dtype))
    return LayerScope(vllm_config, nnx.Rngs(0), quant_config, prefix)
