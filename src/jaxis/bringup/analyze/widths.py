"""The widths that a checkpoint's weights can have in memory: as stored, and as loading can make them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from jaxis.bringup.analyze.construction import Construction, construct
from jaxis.bringup.analyze.source import ModelSource
from jaxis.config import CacheConfig, SchedulerConfig, VllmConfig
from jaxis.config.checkpoint_values import trained_context_length
from jaxis.engine.arguments import EngineArgs
from jaxis.engine.engine_config import DEFAULT_MAX_NUM_BATCHED_TOKENS, DEFAULT_MAX_NUM_SEQS
from jaxis.engine.memory_account import LOW_PRECISION, Width
from jaxis.layers.module import JaxModule
from jaxis.quantization.rules import RuleQuantizationConfig
from jaxis.quantization_rules import DEQUANTIZE, SHORT_NAMES

ANY_LENGTH = 1 << 20
"""Tokens of the longest request of a model without a limit."""


def width_of(source: ModelSource, model: JaxModule, vllm_config: VllmConfig, quantization: str | None = None) -> Width:
    """Returns the width of a constructed model, with the engine's default limits and the model's longest context.

    `quantization` is that of `Width`. Raises ConfigError if the config does not say how long a context can be.
    """
    longest = trained_context_length(vllm_config.model_config.hf_config) or ANY_LENGTH
    sized = dataclasses.replace(
        vllm_config,
        model_config=dataclasses.replace(vllm_config.model_config, max_model_len=longest),
        cache_config=CacheConfig(block_size=EngineArgs.block_size),
        scheduler_config=SchedulerConfig(DEFAULT_MAX_NUM_SEQS, DEFAULT_MAX_NUM_BATCHED_TOKENS),
    )
    name = np.dtype(vllm_config.model_config.dtype).name
    if quantization in LOW_PRECISION:
        name = quantization
    elif vllm_config.quant_config is not None:
        name = str((source.config.get("quantization_config") or {}).get("quant_method", "quantized"))
    return Width(quantization, sized, model, name=name)


def other_widths(source: ModelSource, stored: Width) -> Iterator[Width]:
    """Yields the widths that loading can make of the stored one: of a quantized checkpoint, floats.

    Those that some layer's sizes do not allow are left out.
    """
    is_quantized = stored.vllm_config.quant_config is not None
    for quantization in (DEQUANTIZE,) if is_quantized else LOW_PRECISION:
        made = constructed_in(source, quantization)
        if made.model is not None and made.vllm_config is not None and not made.findings:
            yield width_of(source, made.model, made.vllm_config, quantization)


def constructed_in(source: ModelSource, quantization: str) -> Construction:
    """Constructs a model without its checkpoint's quantization, in another one or with DEQUANTIZE in none."""
    rules = None
    if quantization != DEQUANTIZE:
        rules = RuleQuantizationConfig(SHORT_NAMES[quantization], must_match=False)
    return construct({**source.config, "quantization_config": None}, source.config_path, rules)
