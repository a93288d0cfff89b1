"""Formats of small floats whose settings in config.json describe all modules alike: fp8, MXFP8 and MXFP4."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from jaxis.layers.experts import JaxExperts
from jaxis.layers.linear import JaxLinear
from jaxis.layers.weight_format import WeightFormat
from jaxis.layers.weight_method import WeightedLayer
from jaxis.loading.safetensors import TensorInfo
from jaxis.quantization.checkpoint_format import CheckpointFormat, as_stored
from jaxis.quantization.formats.fp8_blocks import FP8_BLOCKS
from jaxis.quantization.formats.fp8_tensor import FBGEMM_FP8, FP8_TENSOR
from jaxis.quantization.formats.microscaling import GROUP_SIZE as MX_GROUP_SIZE
from jaxis.quantization.formats.microscaling import MicroscalingFormat
from jaxis.quantization.formats.mxfp4 import MXFP4
from jaxis.quantization.formats.nvfp4 import GROUP_SIZE as NVFP4_GROUP_SIZE
from jaxis.quantization.formats.nvfp4 import NVFP4, NVFP4_PACKED
from jaxis.quantization.module_patterns import PATTERN_KEYS
from jaxis.quantization.published import PublishedFormat, PublishedQuantizationConfig

_SCALE = "scale"
_PACKED_EXPERTS = MicroscalingFormat(4, "weight", "weight_scale_inv")
_MXFP8 = PublishedFormat(
    read=lambda _: MicroscalingFormat(8, "weight", "weight_scale_inv"),
    layers=(JaxLinear, JaxExperts),
    keys={
        **dict.fromkeys(("quant_method", *PATTERN_KEYS)),
        "weight_block_size": ([1, MX_GROUP_SIZE],),
        "activation_scheme": ("dynamic",),
        "fmt": ("e4m3", "float8_e4m3fn", None),
        "scale_fmt": ("ue8m0", None),
    },
)
# With NVFP4 for experts; what else these keys say, the tensors show.
_KEYS_OF_EXPERTS: dict[str, tuple[Any, ...] | None] = {
    **dict.fromkeys(("ignore", "quantized_layers", "config_groups", "producer", "kv_cache_quant_algo")),
    "moe_quant_format": ("nvfp4-pack-quantized", None),
    "quant_algo": ("MIXED_PRECISION",),
    "group_size": (NVFP4_GROUP_SIZE,),
}


def _with_experts(
    published: PublishedFormat, settings: Mapping[str, Any], tensors: Mapping[str, TensorInfo] | None
) -> PublishedQuantizationConfig:
    """Reads a format whose experts may have another: NVFP4 by the settings, or MXFP4 by their tensors."""
    keys = {**published.keys, "expert_dtype": ("fp8", "fp4"), "moe_quant_algo": ("NVFP4", None)}
    if settings.get("moe_quant_algo"):
        keys |= _KEYS_OF_EXPERTS
    published = dataclasses.replace(published, keys=keys)
    # As DeepSeek V4 is published. A scale without a weight beside it is a layer's own parameter.
    ends = {name.rpartition(".")[::2] for name in tensors or ()}
    if any(last == _SCALE and (module, "weight") in ends for module, last in ends):
        published = dataclasses.replace(published, renames={_SCALE: "weight_scale_inv"})
    return _ConfigWithExperts(published, settings, tensors)


def _fp8_config(settings: Mapping[str, Any], tensors: Mapping[str, TensorInfo] | None) -> PublishedQuantizationConfig:
    """Reads fp8 with scales of blocks, or of whole tensors and rows."""
    if settings.get("weight_block_size") is None:
        return PublishedQuantizationConfig(FP8_TENSOR, settings, tensors)
    return _with_experts(FP8_BLOCKS, settings, tensors)


def _has_packed_experts(settings: Mapping[str, Any], tensors: Mapping[str, TensorInfo] | None) -> bool:
    if tensors is None:
        return settings.get("expert_dtype") == "fp4"
    return any(
        info.dtype in (np.int8, np.uint8) and ".experts." in name and name.endswith(".weight")
        for name, info in tensors.items()
    )


class _ConfigWithExperts(PublishedQuantizationConfig):
    """A format of all modules but experts, which may have their own."""

    def __init__(
        self, published: PublishedFormat, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo] | None
    ) -> None:
        super().__init__(published, config, tensors)
        self._of_experts: WeightFormat = self.format
        if config.get("moe_quant_format"):
            self._of_experts = NVFP4_PACKED
        elif config.get("moe_quant_algo"):
            self._of_experts = NVFP4
        elif _has_packed_experts(config, tensors):
            self._of_experts = _PACKED_EXPERTS

    def format_of(self, layer: WeightedLayer, names: Sequence[str]) -> WeightFormat | None:
        found = super().format_of(layer, names)
        return self._of_experts if found is not None and isinstance(layer, JaxExperts) else found


FORMATS = (
    CheckpointFormat(("fp8",), as_stored(_fp8_config)),
    CheckpointFormat(("mxfp8",), as_stored(partial(_with_experts, _MXFP8))),
    CheckpointFormat(("fbgemm_fp8",), as_stored(partial(PublishedQuantizationConfig, FBGEMM_FP8))),
    CheckpointFormat(("mxfp4",), as_stored(partial(PublishedQuantizationConfig, MXFP4))),
)
