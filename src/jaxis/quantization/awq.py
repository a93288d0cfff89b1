"""Checkpoints quantized by AWQ: which modules are, and how. What AWQ does to activations is folded into their weights.

Source: AutoAWQ and transformers' AwqConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxis.errors import ConfigError
from jaxis.kernels.weights import CodedWeight, QuantizedWeight
from jaxis.layers.weight_format import TensorSpec, WeightFormat
from jaxis.loading.safetensors import TensorInfo
from jaxis.quantization.by_tensors import FormatsByTensors
from jaxis.quantization.formats.integer_groups import (
    SCALE_DTYPES,
    check_columns,
    group_sizes,
    in_equal_groups,
    planes_of,
    weight_of,
)
from jaxis.quantization.formats.word_packing import num_words, unpack_numbers
from jaxis.quantization.module_patterns import EMBEDDING_NAMES, WHERE
from jaxis.quantization.tool_keys import check_tool_keys, read_bits, read_bool, read_group_size

# AWQ's packed 4-bit integers, as AutoAWQ writes them for its "gemm" and "gemv" kernels.
#
# "gemm": `qweight` int32 [in, out / 8], `qzeros` int32 [groups, out / 8], `scales` [groups, out]; the numbers in a
# word, from the lowest bits, are those of outputs 0, 2, 4, 6, 1, 3, 5 and 7. "gemv": `qweight` int32 [out, in / 8] in
# order, `qzeros` int32 [out, groups / 8] and `scales` [out, groups], with groups filled up to whole words and more.
# Source: AutoAWQ's WQLinear_GEMM and WQLinear_GEMV.


_BITS = 4
_NUMBERS_PER_WORD = 8
_OUTPUTS_IN_WORD = (0, 2, 4, 6, 1, 3, 5, 7)
_INT32 = (np.dtype(np.int32),)


@dataclass(frozen=True)
class AwqGemmFormat:
    """`qweight` and `qzeros`, packed along the outputs, and `scales`.

    Attributes:
      group_size: Features that share a scale; None means all of them.
      has_zeros: Whether there is `qzeros`; without, every zero point is 8.
    """

    group_size: int | None
    has_zeros: bool = True

    def tensors(self, shape: tuple[int, ...]) -> Mapping[str, TensorSpec]:
        rows, columns = shape
        check_columns(columns)
        groups, words = len(group_sizes(columns, self.group_size)), -(-rows // _NUMBERS_PER_WORD)
        specs = {
            "qweight": TensorSpec((columns, words), _INT32),
            "scales": TensorSpec((groups, rows), SCALE_DTYPES),
        }
        return specs | {"qzeros": TensorSpec((groups, words), _INT32)} if self.has_zeros else specs

    def assemble(self, tensors: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> QuantizedWeight | CodedWeight:
        rows, columns = shape
        words = np.asarray(tensors["qweight"]).view(np.uint32)
        pairs = _of_outputs([_number(words[::2], i) | _number(words[1::2], i) << 4 for i in range(_NUMBERS_PER_WORD)])
        zero_point = None
        if self.has_zeros:
            zeros = np.asarray(tensors["qzeros"]).view(np.uint32)
            zero_point = _of_outputs([_number(zeros, i) for i in range(_NUMBERS_PER_WORD)])[:rows]
        scale = np.ascontiguousarray(tensors["scales"].T)
        scale, zero_point = in_equal_groups(group_sizes(columns, self.group_size), scale, zero_point)
        return weight_of({"codes": pairs[:rows]}, _BITS, scale, zero_point)


@dataclass(frozen=True)
class AwqGemvFormat:
    """`qweight` and `qzeros`, packed along the features and groups, and `scales`.

    Attributes:
      group_size: Features that share a scale; None means all of them.
      num_zero_words: Words of `qzeros` for each output; as many eights of scales.
    """

    group_size: int | None
    num_zero_words: int

    def tensors(self, shape: tuple[int, ...]) -> Mapping[str, TensorSpec]:
        rows, columns = shape
        check_columns(columns)
        groups = len(group_sizes(columns, self.group_size))
        if num_words(groups, _BITS) > self.num_zero_words:
            raise ValueError(f"has {self.num_zero_words} words of zero points for a row of {groups} groups")
        return {
            "qweight": TensorSpec((rows, num_words(columns, _BITS)), _INT32),
            "qzeros": TensorSpec((rows, self.num_zero_words), _INT32),
            "scales": TensorSpec((rows, _NUMBERS_PER_WORD * self.num_zero_words), SCALE_DTYPES),
        }

    def assemble(self, tensors: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> QuantizedWeight | CodedWeight:
        columns = shape[1]
        sizes = group_sizes(columns, self.group_size)
        scale = np.ascontiguousarray(tensors["scales"][:, : len(sizes)])
        zero_point = unpack_numbers(tensors["qzeros"], _BITS, len(sizes))
        scale, zero_point = in_equal_groups(sizes, scale, zero_point)
        return weight_of(planes_of(tensors["qweight"], _BITS, columns), _BITS, scale, zero_point)


def _number(words: np.ndarray, place: int) -> np.ndarray:
    """The number at a place of each word, as uint8."""
    return (words >> np.uint32(_BITS * place)).astype(np.uint8) & np.uint8(0xF)


def _of_outputs(parts: list[np.ndarray]) -> np.ndarray:
    """The numbers at each place of words, uint8 [n, out / 8] -> uint8 [out, n]."""
    n, words = parts[0].shape
    outputs = np.empty((words, _NUMBERS_PER_WORD, n), np.uint8)
    for output, part in zip(_OUTPUTS_IN_WORD, parts, strict=True):
        outputs[:, output] = part.T
    return outputs.reshape(-1, n)


_KEYS = (
    *("quant_method", "method", "bits", "w_bit", "group_size", "q_group_size", "zero_point", "version", "format"),
    *("modules_to_not_convert", "sym", "data_type", "desc_act", "lm_head", "pack_dtype", "dynamic"),
    *("block_name_to_quantize", "to_quant_block_names"),
)
_OLD_NAMES = {"w_bit": "bits", "q_group_size": "group_size"}
_VERSIONS = ("gemm", "gemv")


@dataclass(frozen=True)
class AwqModules:
    """How each module of a checkpoint is stored.

    Attributes:
      version: "gemm" or "gemv".
      group_size: Features that share a scale; None means all of them.
      has_zeros: Whether there are zero points, if there are no tensors to look at.
      unconverted: Parts of the names of modules that are not quantized, if there are no tensors to look at.
      tensors: Headers of the checkpoint's tensors; None if there are none to look at.
    """

    version: str
    group_size: int | None
    has_zeros: bool
    unconverted: tuple[str, ...]
    tensors: Mapping[str, TensorInfo] | None

    def format_of(self, name: str, shape: tuple[int, ...]) -> WeightFormat | None:
        """See `FormatOf`."""
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
    """A `quantization_config` whose `quant_method` is "awq".

    Raises:
      ConfigError: It asks for something that is not implemented.
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
