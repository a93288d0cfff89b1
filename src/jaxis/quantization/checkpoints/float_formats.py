"""Formats of small floats whose settings in config.json describe all modules alike: fp8 and MXFP4."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from jaxis.loading.safetensors import TensorInfo
from jaxis.quantization.checkpoint_format import CheckpointFormat, as_stored
from jaxis.quantization.formats.fp8_blocks import FP8_BLOCKS
from jaxis.quantization.formats.fp8_tensor import FBGEMM_FP8, FP8_TENSOR
from jaxis.quantization.formats.mxfp4 import MXFP4
from jaxis.quantization.published import PublishedQuantizationConfig


def _fp8_config(settings: Mapping[str, Any], tensors: Mapping[str, TensorInfo] | None) -> PublishedQuantizationConfig:
    """Reads fp8 with scales of blocks, or of whole tensors and rows."""
    published = FP8_TENSOR if settings.get("weight_block_size") is None else FP8_BLOCKS
    return PublishedQuantizationConfig(published, settings, tensors)


FORMATS = (
    CheckpointFormat(("fp8",), as_stored(_fp8_config)),
    CheckpointFormat(("fbgemm_fp8",), as_stored(partial(PublishedQuantizationConfig, FBGEMM_FP8))),
    CheckpointFormat(("mxfp4",), as_stored(partial(PublishedQuantizationConfig, MXFP4))),
)
