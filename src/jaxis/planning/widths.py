"""The widths that a checkpoint's weights can have in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxis.bringup.analyze.config import Construction, construct
from jaxis.bringup.analyze.figures import constructed_in
from jaxis.bringup.analyze.source import ModelSource
from jaxis.config import CacheConfig, SchedulerConfig, VllmConfig
from jaxis.config.checkpoint_values import trained_context_length
from jaxis.engine.arguments import EngineArgs
from jaxis.engine.engine_config import DEFAULT_MAX_NUM_BATCHED_TOKENS, DEFAULT_MAX_NUM_SEQS
from jaxis.engine.memory_account import LOW_PRECISION, Width
from jaxis.errors import ConfigError
from jaxis.quantization_rules import DEQUANTIZE

ANY_LENGTH = 1 << 20
"""Tokens of the longest planned request of a model without a limit."""


def widths(source: ModelSource, quantization: str | None = None, dtype: str | None = None) -> list[Width]:
    """Constructs the widths of a checkpoint, the stored one first, or only that of a value of `--quantization`.

    `dtype` is the type of activations, and of weights in floats; None is the checkpoint's. Raises ConfigError if jaxis
    cannot run the model, or not with this quantization.
    """
    if dtype is not None:
        source = dataclasses.replace(source, config=_with_dtype(source.config, dtype))
    stored = _constructed(source, construct(source.config, source.config_path, tensors=source.tensors))
    is_quantized = stored.vllm_config.quant_config is not None
    if quantization is None:
        return [stored] if is_quantized else [stored, *_quantized_widths(source)]
    if quantization == "none":
        return [stored]
    if is_quantized != (quantization == DEQUANTIZE):
        raise ConfigError(
            f"--quantization {quantization}: the checkpoint is {'' if is_quantized else 'not '}quantized"
            + (f" and cannot be quantized again: leave it out, or give {DEQUANTIZE}" if is_quantized else "")
        )
    return [_constructed(source, constructed_in(source, quantization), quantization)]


def _quantized_widths(source: ModelSource) -> Iterator[Width]:
    for quantization in LOW_PRECISION:
        try:
            yield _constructed(source, constructed_in(source, quantization), quantization)
        except ConfigError:  # some layers' sizes do not allow it
            continue


def _with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    text = config.get("text_config")
    parts = {"text_config": {**text, "dtype": dtype}} if isinstance(text, dict) else {}
    return {**config, **parts, "dtype": dtype}


def _constructed(source: ModelSource, construction: Construction, quantization: str | None = None) -> Width:
    model, vllm_config = construction.model, construction.vllm_config
    if construction.refusals or model is None or vllm_config is None:
        reason = construction.refusals[0] if construction.refusals else "its family is not one of jaxis's"
        raise ConfigError(f"{source.name} cannot run: {reason}; jaxis analyze says more")
    text_config = vllm_config.model_config.hf_config.get_text_config()
    longest = text_config.get("max_position_embeddings", vllm_config.model_config.max_model_len)
    if trained_context_length(vllm_config.model_config.hf_config) is None:
        longest = ANY_LENGTH
    sized = dataclasses.replace(
        vllm_config,
        model_config=dataclasses.replace(vllm_config.model_config, max_model_len=longest),
        cache_config=CacheConfig(block_size=EngineArgs.block_size),
        scheduler_config=SchedulerConfig(DEFAULT_MAX_NUM_SEQS, DEFAULT_MAX_NUM_BATCHED_TOKENS),
    )
    return Width(quantization, sized, model, name=_name(source, vllm_config, quantization))


def _name(source: ModelSource, vllm_config: VllmConfig, quantization: str | None) -> str:
    if quantization in LOW_PRECISION:
        return quantization
    if quantization is None and vllm_config.quant_config is not None:
        parts = (source.config, source.config.get("text_config"))
        stored = [part.get("quantization_config") for part in parts if isinstance(part, dict)]
        return next((str(each["quant_method"]) for each in stored if each and "quant_method" in each), "quantized")
    return np.dtype(vllm_config.model_config.dtype).name
