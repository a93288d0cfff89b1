"""Checkpoints quantized by bitsandbytes: a module's tensors decide whether it is quantized, and how.

The list of unquantized modules in config.json is often wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxis.layers.weight_format import WeightFormat
from jaxis.loading.safetensors import TensorInfo
from jaxis.quantization.by_tensors import FormatsByTensors
from jaxis.quantization.checkpoint_format import CheckpointFormat, as_stored
from jaxis.quantization.formats.bitsandbytes_4bit import QUANT_TYPES, STATE, Bitsandbytes4BitFormat
from jaxis.quantization.formats.bitsandbytes_8bit import Bitsandbytes8BitFormat

_BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)


def bitsandbytes_config(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo] | None) -> FormatsByTensors:
    """Reads a `quantization_config` whose `quant_method` is "bitsandbytes".

    Without tensors to look at, all linear layers except the head count as quantized by config.json.
    """
    if tensors is None:
        return FormatsByTensors(lambda module, _: None if module == "lm_head" else _format_of_config(config))
    return FormatsByTensors(lambda module, shape: _format_of(module, shape, tensors))


def is_quantized(tensors: Mapping[str, TensorInfo]) -> bool:
    """Returns whether any of these tensors is quantized by bitsandbytes."""
    return any(name.endswith(".SCB") or STATE in name for name in tensors)


def _format_of_config(config: Mapping[str, Any]) -> WeightFormat:
    if config.get("load_in_8bit"):
        return Bitsandbytes8BitFormat()
    quant_type = config.get("bnb_4bit_quant_type", "fp4")
    return Bitsandbytes4BitFormat(quant_type, is_nested=bool(config.get("bnb_4bit_use_double_quant")))


def _format_of(module: str, shape: tuple[int, ...], tensors: Mapping[str, TensorInfo]) -> WeightFormat | None:
    if f"{module}.SCB" in tensors:
        return Bitsandbytes8BitFormat(has_weight_format=f"{module}.weight_format" in tensors)
    for quant_type in QUANT_TYPES:
        if f"{module}.{STATE}{quant_type}" in tensors:
            absmax, weight = tensors.get(f"{module}.weight.absmax"), tensors.get(f"{module}.weight")
            return Bitsandbytes4BitFormat(
                quant_type,
                is_nested=f"{module}.weight.nested_absmax" in tensors,
                storage=np.dtype(np.uint8) if weight is None else weight.dtype,
                block_size=_block_size(shape, 0 if absmax is None else absmax.shape[0]),
            )
    return None


def _block_size(shape: tuple[int, ...], num_blocks: int) -> int:
    """Returns the smallest block size that makes this number of blocks of a weight [out, in]."""
    elements = shape[0] * shape[1]
    return next((size for size in _BLOCK_SIZES if -(-elements // size) == num_blocks), 64)


FORMATS = (CheckpointFormat(("bitsandbytes",), as_stored(bitsandbytes_config), is_quantized),)
