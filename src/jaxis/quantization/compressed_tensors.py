"""Checkpoints in the compressed-tensors format: int8 (`int-quantized`), packed int4 (`pack-quantized`) and fp8
(`float-quantized`) weights.

Source: https://github.com/vllm-project/compressed-tensors. config.json's `quantization_config` has groups of settings,
each with the modules it is for: by name, by `re:` and a regular expression, or by class. What is not implemented is
refused by name.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxis.errors import ConfigError
from jaxis.kernels.quantized_matmul.quantize import check_quantizable
from jaxis.layers.module import JaxModule
from jaxis.quantization.block_scaled import BlockScaledLinearMethod, StoredBlocksMethod
from jaxis.quantization.block_scaled_experts import BlockScaledExpertsMethod, StoredBlockExpertsMethod, StoredStacks
from jaxis.quantization.compressed_tensors_experts import CompressedTensorsExpertsMethod
from jaxis.quantization.compressed_tensors_method import CompressedTensorsMethod
from jaxis.quantization.experts import STACK_AXES, select_experts_method
from jaxis.quantization.methods import WeightScheme, select_method
from jaxis.quantization.rules import RuleQuantizationConfig, weight_scheme

if TYPE_CHECKING:
    from jaxis.layers.embed import JaxEmbed
    from jaxis.layers.experts import JaxExperts
    from jaxis.layers.linear import JaxLinear
    from jaxis.quantization.config import ExpertsMethod, LinearMethod

RULES_KEY = "jaxis_quantization"
"""Key of config.json under which `jaxis quantize` leaves its rules: they say which activations to quantize."""

_WHERE = "quantization_config in config.json"
# Key -> the values with which it does nothing, or None where it says nothing about how to compute.
_CONFIG_KEYS: dict[str, tuple[Any, ...] | None] = {
    **dict.fromkeys(("quant_method", "config_groups", "format", "ignore")),
    **dict.fromkeys(("global_compression_ratio", "version")),
    "quantization_status": ("compressed",),
    **dict.fromkeys(("kv_cache_scheme", "sparsity_config", "transform_config", "moe_sparsity_config"), (None, {})),
}
_GROUP_KEYS: dict[str, tuple[Any, ...] | None] = {
    **dict.fromkeys(("targets", "weights", "input_activations", "format")),
    "output_activations": (None,),
}
_COMMON_ARGUMENTS: dict[str, tuple[Any, ...] | None] = {
    **dict.fromkeys(("observer", "observer_kwargs", "scale_dtype", "zp_dtype", "num_bits", "strategy")),
    "type": ("int",),
    "block_structure": (None,),
}
_FLOATS = {"type": ("float",), "num_bits": (8,), "symmetric": (True,), "zp_dtype": None}
_WEIGHT_KEYS = _COMMON_ARGUMENTS | {
    **dict.fromkeys(("symmetric", "group_size")),
    "dynamic": (False,),
    # "weight" and "static" reorder while quantizing, and leave nothing of it in the file.
    "actorder": (None, False, "weight", "static"),
}
_ACTIVATION_KEYS = _COMMON_ARGUMENTS | {
    "num_bits": (8,),
    "strategy": ("token",),
    "symmetric": (True,),
    "dynamic": (True,),
    "group_size": (None,),
    "actorder": (None, False),
}
_FLOAT_WEIGHT_KEYS = (
    _WEIGHT_KEYS | _FLOATS | {"strategy": ("channel", "block"), "block_structure": None, "group_size": (None,)}
)
# Which of these the input is quantized to is an engine's business: here it stays as it is.
_FLOAT_ACTIVATION_KEYS = _ACTIVATION_KEYS | _FLOATS | {"strategy": ("token", "group"), "group_size": None}
_BITS = {"int-quantized": 8, "pack-quantized": 4}
_FLOAT_FORMAT = "float-quantized"
_FP8_SCALE = "weight_scale"


@dataclasses.dataclass(frozen=True)
class _Group:
    """For which modules, and how they are stored: integers by a scheme, or fp8 in blocks.

    `block_shape` (rows, columns) of a block; None is all columns.
    """

    targets: tuple[str, ...]
    format: str
    scheme: WeightScheme | None = None
    block_shape: tuple[int, int | None] | None = None


class CompressedTensorsConfig:
    """A `quantization_config` whose `quant_method` is "compressed-tensors". A QuantizationConfig.

    Args:
      config: The object in config.json.
      rules: Decide which activations are quantized, in place of the groups' `input_activations`.

    Raises:
      ConfigError: It asks for something that is not implemented.
    """

    def __init__(self, config: Mapping[str, Any], rules: RuleQuantizationConfig | None = None) -> None:
        _check_keys(config, _CONFIG_KEYS, _WHERE)
        groups = config.get("config_groups")
        if not isinstance(groups, Mapping) or not groups:
            raise ConfigError(f"{_WHERE} has no config_groups")
        self._groups = [_read_group(group, config.get("format"), f"{_WHERE}: {name}") for name, group in groups.items()]
        self._ignore = tuple(config.get("ignore") or ())
        self._rules = rules

    def get_quant_method(
        self, layer: JaxLinear | JaxEmbed | JaxExperts, prefix: str
    ) -> LinearMethod | ExpertsMethod | None:
        """As QuantizationConfig's."""
        from jaxis.layers.experts import JaxExperts

        is_experts = isinstance(layer, JaxExperts)
        group = self._group_of_experts(layer, prefix) if is_experts else self._group_of(layer, prefix)
        if group is not None and group.block_shape is not None:
            return self._fp8_method(layer, prefix, group.block_shape)
        scheme = None if group is None else group.scheme
        if self._rules is not None:
            scheme = _with_activations_of(weight_scheme(self._rules.find(prefix)), scheme, prefix)
        if group is None or scheme is None:
            return None
        try:
            for in_size in (layer.hidden_size, layer.intermediate_size) if is_experts else (layer.input_size,):
                check_quantizable(in_size, scheme.weight_qtype, scheme.tile_size, scheme.weight_calibration_method)
        except ValueError as error:
            raise ConfigError(f"{_WHERE}: {prefix} {error}") from None
        if is_experts:
            return CompressedTensorsExpertsMethod(group.format, scheme, select_experts_method(layer, scheme))
        return CompressedTensorsMethod(group.format, scheme, select_method(layer, scheme))

    def _fp8_method(
        self, layer: JaxLinear | JaxEmbed | JaxExperts, prefix: str, block_shape: tuple[int, int | None]
    ) -> LinearMethod | ExpertsMethod:
        from jaxis.layers.experts import JaxExperts
        from jaxis.layers.linear import JaxLinear

        if self._rules is not None:
            raise ConfigError(f"{prefix} is stored in fp8 and cannot be quantized again: leave quantization out")
        rows, columns = block_shape
        if isinstance(layer, JaxLinear):
            return StoredBlocksMethod((rows, columns or layer.input_size), _FP8_SCALE, BlockScaledLinearMethod())
        if isinstance(layer, JaxExperts) and columns is not None:
            stored = StoredStacks("", f"_{_FP8_SCALE}", is_mxfp4=False, block_shape=(rows, columns))
            return StoredBlockExpertsMethod(stored, BlockScaledExpertsMethod())
        raise ConfigError(f"{_WHERE}: {prefix} has fp8 weights, which are not supported for it in this form")

    def check_all_used(self) -> None:
        """As QuantizationConfig's; the file's own targets may name modules that the model does not have."""
        if self._rules is not None:
            self._rules.check_all_used()

    def _group_of_experts(self, layer: JaxExperts, prefix: str) -> _Group | None:
        """That of all experts, whose projections are linear layers in the file."""
        names = [f"{prefix}.{expert}.{name}" for expert in range(layer.num_experts) for name in STACK_AXES]
        first, *others = [self._group_of(layer, name) for name in names]
        if any(group != first for group in others):
            raise ConfigError(f"{_WHERE}: experts of {prefix} are quantized in different ways, which is not supported")
        return first

    def _group_of(self, layer: JaxModule | JaxEmbed, prefix: str) -> _Group | None:
        if any(_names(target, prefix) or target == _class_name(layer) for target in self._ignore):
            return None
        for group in self._groups:
            if any(_names(target, prefix) for target in group.targets):
                return group
        return next((group for group in self._groups if _class_name(layer) in group.targets), None)


def _names(target: str, prefix: str) -> bool:
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), prefix) is not None
    return target == prefix


def _class_name(layer: JaxModule) -> str:
    """PyTorch's, by which groups know it."""
    from jaxis.layers.embed import JaxEmbed

    return "Embedding" if isinstance(layer, JaxEmbed) else "Linear"


def _with_activations_of(rule: WeightScheme | None, stored: WeightScheme | None, prefix: str) -> WeightScheme | None:
    """What is stored, with the rule's activations, if the two agree on the weight."""

    def describe(scheme: WeightScheme | None) -> str:
        if scheme is None:
            return "unquantized"
        groups = "one group a row" if scheme.tile_size is None else f"groups of {scheme.tile_size}"
        points = " and zero points" if scheme.weight_calibration_method == "minmax" else ""
        return f"{scheme.weight_qtype} with {groups}{points}"

    if describe(rule) != describe(stored):
        raise ConfigError(
            f"{prefix} is stored {describe(stored)}, but its quantization rule says {describe(rule)}: a quantized "
            "checkpoint cannot be quantized again, leave quantization out"
        )
    return None if rule is None or stored is None else dataclasses.replace(stored, act_qtype=rule.act_qtype)


def _read_group(group: Any, default_format: Any, where: str) -> _Group:
    _check_keys(group, _GROUP_KEYS, where)
    weights, activations = group.get("weights"), group.get("input_activations")
    targets, file_format = group.get("targets"), group.get("format") or default_format
    if file_format not in (*_BITS, _FLOAT_FORMAT):
        known = ", ".join((*_BITS, _FLOAT_FORMAT))
        raise ConfigError(f"{where}: format={file_format!r} is not supported; known: {known}")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise ConfigError(f"{where}: targets={targets!r} must be a list of names")
    if file_format == _FLOAT_FORMAT:
        return _Group(tuple(targets), file_format, block_shape=_fp8_blocks(weights, activations, where))
    _check_keys(weights, _WEIGHT_KEYS, f"{where}: weights")
    if activations is not None:
        _check_keys(activations, _ACTIVATION_KEYS, f"{where}: input_activations")
    bits, strategy, group_size = weights.get("num_bits"), weights.get("strategy"), weights.get("group_size")
    symmetric = weights.get("symmetric", True)
    if bits != _BITS[file_format] or (bits == 8 and not symmetric):
        kind = f"{'' if symmetric else 'asymmetric '}int{bits}"
        raise ConfigError(f"{where}: {kind} weights as {file_format} are not supported")
    # -1 is how older versions write that there are no groups.
    if strategy is None:
        strategy = "group" if group_size not in (None, -1) else "channel"
    is_grouped = strategy == "group"
    if strategy not in ("channel", "group") or is_grouped != (type(group_size) is int and group_size > 0):
        raise ConfigError(f"{where}: strategy={strategy!r} with group_size={group_size!r} is not supported")
    scheme = WeightScheme(
        weight_qtype=f"int{bits}",
        act_qtype=None if activations is None else "int8",
        tile_size=group_size if is_grouped else None,
        weight_calibration_method="absmax" if symmetric else "minmax",
    )
    return _Group(tuple(targets), file_format, scheme)


def _fp8_blocks(weights: Any, activations: Any, where: str) -> tuple[int, int | None]:
    _check_keys(weights, _FLOAT_WEIGHT_KEYS, f"{where}: weights")
    if activations is not None:
        _check_keys(activations, _FLOAT_ACTIVATION_KEYS, f"{where}: input_activations")
    if weights.get("strategy") != "block":
        return 1, None
    block = weights.get("block_structure")
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise ConfigError(f"{where}: weights: block_structure={block!r} must be [rows, columns]")
    return block[0], block[1]


def _check_keys(value: Any, known: Mapping[str, tuple[Any, ...] | None], where: str) -> None:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} is {value!r}, expected an object")
    for key, setting in value.items():
        if key not in known:
            raise ConfigError(f"{where} has the key {key!r}, which is not supported")
        allowed = known[key]
        if allowed is not None and setting not in allowed:
            raise ConfigError(f"{where}: {key}={setting!r} is not supported; supported: {allowed[0]!r}")
