"""Checkpoints quantized by GPTQ: the formats of their modules.

A module is quantized if the file has its `qweight`; the shapes of `qweight` and `scales` give the bits and the groups.
So config.json decides only what tensors do not show: how zero points are written, and whether columns are reordered.
Source: AutoGPTQ, GPTQModel and transformers' GPTQConfig.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxis.errors import ConfigError
from jaxis.layers.weight_format import WeightFormat
from jaxis.loading.safetensors import TensorInfo
from jaxis.quantization.by_tensors import FormatsByTensors
from jaxis.quantization.checkpoint_format import CheckpointFormat, as_stored
from jaxis.quantization.checkpoints.awq import awq_config
from jaxis.quantization.formats.gptq import GptqFormat
from jaxis.quantization.formats.integer_groups import BITS, group_sizes
from jaxis.quantization.formats.word_packing import num_words
from jaxis.quantization.module_patterns import EMBEDDING_NAMES, WHERE
from jaxis.quantization.tool_keys import check_tool_keys, read_bits, read_bool, read_group_size

_SETTINGS = ("bits", "group_size", "sym", "desc_act", "static_groups")
_KEYS = (
    *_SETTINGS,
    *("quant_method", "method", "checkpoint_format", "format", "lm_head", "dynamic", "pack_dtype", "data_type"),
    *("modules_in_block_to_quantize", "block_name_to_quantize", "to_quant_block_names", "modules_to_not_convert"),
)
_ZEROS_LESS_ONE = {"gptq": True, "gptq_v2": False}
_AWQ_FORMATS = ("gemm", "awq")


@dataclass(frozen=True)
class GptqSettings:
    """Quantization settings of a module.

    Attributes:
      group_size: Features that share a scale; None means all of them.
      is_symmetric: True if all zero points are in the middle; None if config.json does not say.
      reorders: True if columns were quantized in another order ("act-order"), so that groups are not neighbours.
    """

    bits: int
    group_size: int | None
    is_symmetric: bool | None
    reorders: bool

    @classmethod
    def of(cls, config: Mapping[str, Any], where: str) -> GptqSettings:
        """Reads the settings. Raises ConfigError for values that are not supported."""
        group_size = read_group_size(config.get("group_size"), where)
        keeps_groups = read_bool(config, "static_groups", where) or group_size is None
        return cls(
            read_bits(config.get("bits"), BITS, where),
            group_size,
            read_bool(config, "sym", where, None),
            bool(read_bool(config, "desc_act", where)) and not keeps_groups,
        )


@dataclass(frozen=True)
class GptqModules:
    """The format of each module of a checkpoint.

    Attributes:
      default: Settings of modules that no rule names.
      rules: (Regular expression that matches a name from its start, settings of those modules; None: not quantized).
      zeros_less_one: The flag of `GptqFormat`.
      tensors: Headers of the checkpoint's tensors; None if there are none to look at.
      has_quantized_head: True if the head is quantized; used if there are no tensors to look at.
    """

    default: GptqSettings
    rules: tuple[tuple[re.Pattern[str], GptqSettings | None], ...]
    zeros_less_one: bool
    tensors: Mapping[str, TensorInfo] | None
    has_quantized_head: bool = False

    def format_of(self, name: str, shape: tuple[int, ...]) -> WeightFormat | None:
        """Finds the format of a module. Raises ConfigError if columns are reordered, but the file lacks their order."""
        settings = next((found for pattern, found in self.rules if pattern.match(name)), self.default)
        if self.tensors is None:
            last = name.rpartition(".")[2]
            if settings is None or last in EMBEDDING_NAMES or (last == "lm_head" and not self.has_quantized_head):
                return None
            return GptqFormat(settings.bits, settings.group_size, settings.is_symmetric, self.zeros_less_one)
        words, scales = self.tensors.get(f"{name}.qweight"), self.tensors.get(f"{name}.scales")
        if words is None:
            return None
        settings = self.default if settings is None else settings
        settings = _as_stored(settings, shape, words.shape, None if scales is None else scales.shape)
        if settings.reorders and f"{name}.g_idx" not in self.tensors:
            raise ConfigError(
                f"{WHERE} says desc_act, but the checkpoint has no {name}.g_idx with the order of its columns: "
                "download it again, or use a checkpoint without desc_act"
            )
        return GptqFormat(
            settings.bits,
            settings.group_size,
            settings.is_symmetric,
            self.zeros_less_one,
            has_zeros=f"{name}.qzeros" in self.tensors or not settings.is_symmetric,
            has_order=f"{name}.g_idx" in self.tensors,
            reorders=settings.reorders,
            has_bias=f"{name}.bias" in self.tensors,
        )


def gptq_config(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo] | None) -> FormatsByTensors:
    """Reads a `quantization_config` whose `quant_method` is "gptq".

    Raises ConfigError if the object asks for something that is not implemented.
    """
    file_format = config.get("checkpoint_format") or config.get("format") or "gptq"
    if config.get("is_marlin_format"):
        file_format = "marlin"
    if file_format in _AWQ_FORMATS:
        renamed = {key: value for key, value in config.items() if key not in ("checkpoint_format", "format", "sym")}
        return awq_config({**renamed, "version": "gemm"}, tensors)
    if not isinstance(file_format, str) or file_format not in _ZEROS_LESS_ONE:
        raise ConfigError(
            f"{WHERE}: checkpoint_format={file_format!r} is laid out for other kernels and is not read: use a "
            f"checkpoint in the format {' or '.join(_ZEROS_LESS_ONE)}"
        )
    check_tool_keys(config, _KEYS, WHERE)
    if config.get("pack_dtype") not in (None, "int32"):
        raise ConfigError(f"{WHERE}: pack_dtype={config['pack_dtype']!r} is not supported; supported: 'int32'")
    if config.get("data_type") not in (None, "int"):
        raise ConfigError(f"{WHERE}: data_type={config['data_type']!r} is not supported; supported: 'int'")
    modules = GptqModules(
        GptqSettings.of(config, WHERE),
        _read_rules(config),
        _ZEROS_LESS_ONE[file_format],
        tensors,
        bool(config.get("lm_head")),
    )
    return FormatsByTensors(modules.format_of)


def _read_rules(config: Mapping[str, Any]) -> tuple[tuple[re.Pattern[str], GptqSettings | None], ...]:
    """Returns the rules under `dynamic`, of which the first match decides, then one for modules that are not listed."""
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        raise ConfigError(f"{WHERE}: dynamic={dynamic!r} must be an object")
    rules = []
    for key, changes in dynamic.items():
        where = f"{WHERE}: dynamic: {key}"
        try:
            pattern = re.compile(key.removeprefix("+:").removeprefix("-:"))
        except re.error as error:
            raise ConfigError(f"{where} is not a regular expression: {error}") from None
        if key.startswith("-:"):
            rules.append((pattern, None))
            continue
        if not isinstance(changes, Mapping):
            raise ConfigError(f"{where} is {changes!r}, expected an object")
        check_tool_keys(changes, _SETTINGS, where)
        rules.append((pattern, GptqSettings.of({**{key: config.get(key) for key in _SETTINGS}, **changes}, where)))
    return (*rules, *_rules_of_listed_modules(config))


def _rules_of_listed_modules(config: Mapping[str, Any]) -> list[tuple[re.Pattern[str], None]]:
    """Returns a rule against quantizing modules outside `modules_in_block_to_quantize`, if there is that key."""
    listed = config.get("modules_in_block_to_quantize")
    if not listed:
        return []
    parts = listed if isinstance(listed, list) else [listed]
    names = [name for part in parts for name in (part if isinstance(part, list) else [part])]
    if not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{WHERE}: modules_in_block_to_quantize={listed!r} must be lists of names")
    return [(re.compile(rf"(?!.*(?:^|\.)(?:{'|'.join(map(re.escape, names))})$)"), None)]


def _as_stored(
    settings: GptqSettings, shape: tuple[int, ...], words: tuple[int, ...], scales: tuple[int, ...] | None
) -> GptqSettings:
    """Returns settings with bits and groups by the shapes of `qweight` and `scales`: config.json may be wrong."""
    columns = shape[1]
    if words and words[0] != num_words(columns, settings.bits):
        fitting = [bits for bits in BITS if num_words(columns, bits) == words[0]]
        settings = dataclasses.replace(settings, bits=fitting[0]) if fitting else settings
    if (
        scales
        and scales[0]
        and len(group_sizes(columns, settings.group_size)) != scales[0]
        and columns % scales[0] == 0
    ):
        group_size = None if scales[0] == 1 else columns // scales[0]
        settings = dataclasses.replace(settings, group_size=group_size)
    return settings


FORMATS = (CheckpointFormat(("gptq", "gptqmodel"), as_stored(gptq_config), is_always_stored=True),)
