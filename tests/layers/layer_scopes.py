"""Scopes for making layers without a checkpoint, and how to run a layer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxis.config import ModelConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.layers.scope import LayerScope


def scope_of(
    config: dict[str, Any],
    *,
    dtype: Any = jnp.float32,
    quant_config: Any = None,
    prefix: str = "",
    max_model_len: int = 2048,
) -> LayerScope:
    """The scope of a layer in a model with this config.json."""
    vllm_config = VllmConfig(ModelConfig("", HFConfig(config), dtype=dtype, max_model_len=max_model_len))
    return LayerScope(vllm_config, nnx.Rngs(0), quant_config, prefix)


def in_one_program(layer: nnx.Module, *operands: Any) -> Any:
    """The layer's result for these operands. Called as it is, each of its operations would be compiled alone."""
    graph, state = nnx.split(layer)
    return jax.jit(lambda state, *operands: nnx.merge(graph, state)(*operands))(state, *operands)
