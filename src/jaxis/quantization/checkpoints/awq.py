"""Checkpoints quantized by AWQ: the formats of their modules. The weights include what AWQ does to activations.

Source: AutoAWQ and transformers' AwqConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxis.errors import ConfigError
from jaxis.layers.weight_format import WeightFormat
from jaxis.loading.safetensors import TensorInfo
from jaxis.quantization.by_tensors import FormatsByTensors
from jaxis.quantization.checkpoint_format import CheckpointFormat, as_stored
from jaxis.quantization.formats.awq import AwqGemmFormat, AwqGemvFormat
from jaxis.quantization.module_patterns import EMBEDDING_NAMES, WHERE
from jaxis.quantization.tool_keys import check_tool_keys, read_bits, read_bool, read_group_size

_KEYS = (
    *("quant_method", "method", "bits", "w_bit", "group_size", "q_group_size", "zero_point", "version", "format"),
    *("modules_to_not_convert", "sym", "data_type", "desc_act", "lm_head", "pack_dtype", "dynamic"),
    *("block_name_to_quantize", "to_quant_block_names"),
)
_OLD_NAMES = {"w_bit": "bits", "q_group_size": "group_size"}
_VERSIONS = ("gemm", "gemv")


@dataclass(frozen=True)
class AwqModules:
    """The format of each module of a checkpoint.

    Attributes:
      version: "gemm" or "gemv".
      group_size: Features that share a scale; None means all of them.
      has_zeros: True if there are zero points; used if there are no tensors to look at.
      unconverted: Parts of the names of unquantized modules; used if there are no tensors to look at.
    """

    version: str
    group_size: int | None
    has_zeros: bool
    unconverted: tuple[str, ...]
    tensors: Mapping[str, TensorInfo] | None

    def format_of(self, name: str, shape: tuple[int, ...]) -> WeightFormat | None:
        if self.tensors is None:
            is_left = name.rpartition(".")[2] in (*EMBEDDING_NAMES, "lm_head")
            return None if is_left or any(part in name for part in self.unconverted) else AwqGemmFormat(self.group_size)
        if f"{name}.qweight" not in self.tensors:
            return None
        zeros, scales = self.tensors.get(f"{name}.qzeros"), self.tensors.get(f"{name}.scales")
        if self.version == "gemv":
            words = zeros.shape[-1] if zeros is not None and zeros.shape else 0
            return AwqGemvFormat(self.group_size, words)
        group_size = self.group_size
        if scales is not None and scales.shape and scales.shape[0] and shape[1] % scales.shape[0] == 0:
            group_size = None if scales.shape[0] == 1 else shape[1] // scales.shape[0]
        return AwqGemmFormat(group_size, has_zeros=zeros is not None or self.has_zeros)


def awq_config(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo] | None) -> FormatsByTensors:
    """Reads a `quantization_config` whose `quant_method` is "awq".

    Raises ConfigError if the object asks for something that is not implemented.
    """
    check_tool_keys(config, _KEYS, WHERE)
    config = {_OLD_NAMES.get(key, key): value for key, value in config.items()}
    version = config.get("version") or config.get("format") or "gemm"
    if not isinstance(version, str) or version.lower() not in _VERSIONS:
        raise ConfigError(
            f"{WHERE}: version={version!r} is laid out for other kernels and is not read: use a checkpoint of the "
            f"version {' or '.join(_VERSIONS)}"
        )
    read_bits(config.get("bits", 4), (4,), WHERE)
    unconverted = config.get("modules_to_not_convert") or ()
    if not isinstance(unconverted, list | tuple) or not all(isinstance(name, str) for name in unconverted):
        raise ConfigError(f"{WHERE}: modules_to_not_convert={unconverted!r} must be a list of names")
    modules = AwqModules(
        version.lower(),
        read_group_size(config.get("group_size", 128), WHERE),
        bool(read_bool(config, "zero_point", WHERE, True)),
        tuple(unconverted),
        tensors,
    )
    return FormatsByTensors(modules.format_of)


FORMATS = (CheckpointFormat(("awq",), as_stored(awq_config), is_always_stored=True),)
