"""The widths of a checkpoint's weights that a plan considers."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxis.bringup.analyze.construction import construct
from jaxis.bringup.analyze.source import ModelSource
from jaxis.bringup.analyze.widths import constructed_in, other_widths, width_of
from jaxis.engine.memory_account import Width
from jaxis.errors import ConfigError
from jaxis.quantization_rules import DEQUANTIZE


def widths(source: ModelSource, quantization: str | None = None, dtype: str | None = None) -> list[Width]:
    """Constructs the widths of a checkpoint, the stored one first, or only that of a value of `--quantization`.

    `dtype` is the type of activations, and of weights in floats; None is the checkpoint's. Raises ConfigError if jaxis
    cannot run the model, or not with this quantization.
    """
    if dtype is not None:
        source = dataclasses.replace(source, config=_with_dtype(source.config, dtype))
    construction = construct(source.config, source.config_path, tensors=source.tensors)
    stored = width_of(source, *construction.checked(f"{source.name} cannot run"))
    is_quantized = stored.vllm_config.quant_config is not None
    if quantization is None:
        return [stored] if is_quantized else [stored, *other_widths(source, stored)]
    if quantization == "none":
        return [stored]
    if is_quantized != (quantization == DEQUANTIZE):
        raise ConfigError(
            f"--quantization {quantization}: the checkpoint is {'' if is_quantized else 'not '}quantized"
            + (f" and cannot be quantized again: leave it out, or give {DEQUANTIZE}" if is_quantized else "")
        )
    made = constructed_in(source, quantization).checked(f"{source.name} cannot run")
    return [width_of(source, *made, quantization)]


def _with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    text = config.get("text_config")
    parts = {"text_config": {**text, "dtype": dtype}} if isinstance(text, dict) else {}
    return {**config, **parts, "dtype": dtype}
