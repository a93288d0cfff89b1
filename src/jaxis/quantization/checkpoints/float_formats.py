"""Formats of small floats whose settings in config.json describe all modules alike: fp8 and MXFP4."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from jaxis.layers.experts import JaxExperts
from jaxis.layers.weight_format import WeightFormat
from jaxis.layers.weight_method import WeightedLayer
from jaxis.loading.safetensors import TensorInfo
from jaxis.quantization.checkpoint_format import CheckpointFormat, as_stored
from jaxis.quantization.formats.fp8_blocks import FP8_BLOCKS
from jaxis.quantization.formats.fp8_tensor import FBGEMM_FP8, FP8_TENSOR
from jaxis.quantization.formats.microscaling import MicroscalingFormat
from jaxis.quantization.formats.mxfp4 import MXFP4
from jaxis.quantization.published import PublishedQuantizationConfig


def _fp8_config(settings: Mapping[str, Any], tensors: Mapping[str, TensorInfo] | None) -> PublishedQuantizationConfig:
    """Reads fp8 with scales of blocks, or of whole tensors and rows."""
    published = FP8_TENSOR if settings.get("weight_block_size") is None else FP8_BLOCKS
    if not any(name.endswith(f".{_SCALE}") for name in tensors or ()):
        return PublishedQuantizationConfig(published, settings, tensors)
    keys = {**published.keys, "expert_dtype": ("fp8", "fp4")}
    return _DeepseekV4Config(
        dataclasses.replace(published, keys=keys, renames={_SCALE: _MX_EXPERTS.scale_name}), settings, tensors
    )


_SCALE = "scale"
_MX_EXPERTS = MicroscalingFormat(4, "weight", "weight_scale_inv")


class _DeepseekV4Config(PublishedQuantizationConfig):
    """fp8 with scales named `scale`, and experts in fp8, too, or in MXFP4: two elements in a byte."""

    @functools.cached_property
    def _has_packed_experts(self) -> bool:
        tensors = (self._tensors or {}).items()
        return any(info.dtype in (np.int8, np.uint8) and ".experts." in name for name, info in tensors)

    def format_of(self, layer: WeightedLayer, names: Sequence[str]) -> WeightFormat | None:
        found = super().format_of(layer, names)
        is_packed = found is not None and isinstance(layer, JaxExperts) and self._has_packed_experts
        return _MX_EXPERTS if is_packed else found


FORMATS = (
    CheckpointFormat(("fp8",), as_stored(_fp8_config)),
    CheckpointFormat(("fbgemm_fp8",), as_stored(partial(PublishedQuantizationConfig, FBGEMM_FP8))),
    CheckpointFormat(("mxfp4",), as_stored(partial(PublishedQuantizationConfig, MXFP4))),
)
