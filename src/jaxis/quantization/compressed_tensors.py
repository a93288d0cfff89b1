"""Checkpoints in the compressed-tensors format: int8 (`int-quantized`), packed int4 (`pack-quantized`) and fp8
(`float-quantized`) weights.

Source: https://github.com/vllm-project/compressed-tensors. config.json's `quantization_config` has groups of settings,
each with its target modules: by name, by `re:` and a regular expression, or by class. Settings that are not implemented
are errors that name them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from jaxis.errors import ConfigError
from jaxis.kernels.weights import WeightScheme
from jaxis.layers.embed import JaxEmbed
from jaxis.layers.experts import STACK_AXES, JaxExperts
from jaxis.layers.weight_format import WeightFormat
from jaxis.layers.weight_method import WeightedLayer, WeightMethod
from jaxis.quantization.formats.fp8_blocks import Fp8BlocksFormat
from jaxis.quantization.formats.fp8_tensor import Fp8TensorFormat
from jaxis.quantization.formats.integers import IntQuantizedFormat, PackQuantizedFormat
from jaxis.quantization.module_patterns import WHERE, check_keys
from jaxis.quantization.published import stored_as
from jaxis.quantization.rules import RuleQuantizationConfig, weight_scheme

RULES_KEY = "jaxis_quantization"
"""Key of config.json under which `jaxis quantize` leaves its rules: they say which activations to quantize."""

# Key -> the values with which it has no effect, or None if no value has one.
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
    # "weight" and "static" reorder only while quantizing; the file does not depend on it.
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
    _WEIGHT_KEYS
    | _FLOATS
    | {"strategy": ("channel", "block", "tensor"), "block_structure": None, "group_size": (None,)}
)
# An engine may choose whether to quantize the input so; here it is not quantized.
_FLOAT_ACTIVATION_KEYS = _ACTIVATION_KEYS | _FLOATS | {"strategy": ("token", "group"), "group_size": None}
_STATIC_ACTIVATION_KEYS = _FLOAT_ACTIVATION_KEYS | {"strategy": ("tensor",), "dynamic": (False,)}
_BITS = {"int-quantized": 8, "pack-quantized": 4}
_FLOAT_FORMAT = "float-quantized"


@dataclasses.dataclass(frozen=True)
class _Group:
    """Target modules and how they are stored; `scheme` is set for integers."""

    targets: tuple[str, ...]
    format: WeightFormat
    scheme: WeightScheme | None = None


class CompressedTensorsConfig:
    """A `quantization_config` whose `quant_method` is "compressed-tensors". A QuantizationConfig.

    Args:
      config: The object in config.json.
      rules: Decide which activations are quantized, overriding the groups' `input_activations`.

    Raises:
      ConfigError: It asks for something that is not implemented.
    """

    def __init__(self, config: Mapping[str, Any], rules: RuleQuantizationConfig | None = None) -> None:
        check_keys(config, _CONFIG_KEYS, WHERE)
        groups = config.get("config_groups")
        if not isinstance(groups, Mapping) or not groups:
            raise ConfigError(f"{WHERE} has no config_groups")
        self._groups = [_read_group(group, config.get("format"), f"{WHERE}: {name}") for name, group in groups.items()]
        self._ignore = tuple(config.get("ignore") or ())
        self._rules = rules

    def get_quant_method(self, layer: WeightedLayer, prefix: str) -> WeightMethod | None:
        """See `QuantizationConfig`."""
        is_experts = isinstance(layer, JaxExperts)
        group = self._group_of_experts(layer, prefix) if is_experts else self._group_of(layer, prefix)
        stored = None if group is None else group.scheme
        if self._rules is None:
            return None if group is None else stored_as(group.format, layer, prefix)
        if group is not None and stored is None:
            raise ConfigError(f"{prefix} is stored in fp8 and cannot be quantized again: leave quantization out")
        scheme = _with_activations_of(weight_scheme(self._rules.find(prefix)), stored, prefix)
        return None if scheme is None else stored_as(_integer_format(scheme), layer, prefix)

    def check_all_used(self) -> None:
        """See `QuantizationConfig`; the file's own targets may name modules that the model does not have."""
        if self._rules is not None:
            self._rules.check_all_used()

    def _group_of_experts(self, layer: JaxExperts, prefix: str) -> _Group | None:
        """The group of all experts of a layer; their projections are linear layers in the file."""
        names = [f"{prefix}.{expert}.{name}" for expert in range(layer.num_experts) for name in STACK_AXES]
        first, *others = [self._group_of(layer, name) for name in names]
        if any(group != first for group in others):
            raise ConfigError(f"{WHERE}: experts of {prefix} are quantized in different ways, which is not supported")
        return first

    def _group_of(self, layer: WeightedLayer, prefix: str) -> _Group | None:
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


def _class_name(layer: WeightedLayer) -> str:
    """The layer's class name in PyTorch, which groups refer to."""
    return "Embedding" if isinstance(layer, JaxEmbed) else "Linear"


def _with_activations_of(rule: WeightScheme | None, stored: WeightScheme | None, prefix: str) -> WeightScheme | None:
    """The stored scheme with the rule's activations, if the two agree on the weight."""

    def describe(scheme: WeightScheme | None) -> str:
        if scheme is None:
            return "unquantized"
        groups = "one group a row" if scheme.group_size is None else f"groups of {scheme.group_size}"
        points = " and zero points" if scheme.weight_calibration_method == "minmax" else ""
        return f"{scheme.weight_qtype} with {groups}{points}"

    if describe(rule) != describe(stored):
        raise ConfigError(
            f"{prefix} is stored {describe(stored)}, but its quantization rule says {describe(rule)}: a quantized "
            "checkpoint cannot be quantized again, leave quantization out"
        )
    return None if rule is None or stored is None else dataclasses.replace(stored, act_qtype=rule.act_qtype)


def _read_group(group: Any, default_format: Any, where: str) -> _Group:
    check_keys(group, _GROUP_KEYS, where)
    weights, activations = group.get("weights"), group.get("input_activations")
    targets, file_format = group.get("targets"), group.get("format") or default_format
    if file_format not in (*_BITS, _FLOAT_FORMAT):
        known = ", ".join((*_BITS, _FLOAT_FORMAT))
        raise ConfigError(f"{where}: format={file_format!r} is not supported; known: {known}")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise ConfigError(f"{where}: targets={targets!r} must be a list of names")
    if file_format == _FLOAT_FORMAT:
        return _Group(tuple(targets), _float_format(weights, activations, where))
    check_keys(weights, _WEIGHT_KEYS, f"{where}: weights")
    if activations is not None:
        check_keys(activations, _ACTIVATION_KEYS, f"{where}: input_activations")
    bits, strategy, group_size = weights.get("num_bits"), weights.get("strategy"), weights.get("group_size")
    symmetric = weights.get("symmetric", True)
    if bits != _BITS[file_format] or (bits == 8 and not symmetric):
        kind = f"{'' if symmetric else 'asymmetric '}int{bits}"
        raise ConfigError(f"{where}: {kind} weights as {file_format} are not supported")
    # Older versions write -1 for no groups.
    if strategy is None:
        strategy = "group" if group_size not in (None, -1) else "channel"
    is_grouped = strategy == "group"
    if strategy not in ("channel", "group") or is_grouped != (type(group_size) is int and group_size > 0):
        raise ConfigError(f"{where}: strategy={strategy!r} with group_size={group_size!r} is not supported")
    scheme = WeightScheme(
        weight_qtype=f"int{bits}",
        group_size=group_size if is_grouped else None,
        weight_calibration_method="absmax" if symmetric else "minmax",
        act_qtype=None if activations is None else "int8",
    )
    return _Group(tuple(targets), _integer_format(scheme), scheme)


def _integer_format(scheme: WeightScheme) -> WeightFormat:
    return PackQuantizedFormat(scheme) if scheme.weight_qtype == "int4" else IntQuantizedFormat(scheme)


def _float_format(weights: Any, activations: Any, where: str) -> WeightFormat:
    check_keys(weights, _FLOAT_WEIGHT_KEYS, f"{where}: weights")
    has_input_scale = weights.get("strategy") == "tensor" and bool(activations) and not activations.get("dynamic")
    if activations is not None:
        keys = _STATIC_ACTIVATION_KEYS if has_input_scale else _FLOAT_ACTIVATION_KEYS
        check_keys(activations, keys, f"{where}: input_activations")
    if weights.get("strategy") == "tensor":
        return Fp8TensorFormat(has_input_scale)
    if weights.get("strategy") != "block":
        return Fp8BlocksFormat((1, None), "weight_scale")
    block = weights.get("block_structure")
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise ConfigError(f"{where}: weights: block_structure={block!r} must be [rows, columns]")
    return Fp8BlocksFormat((block[0], block[1]), "weight_scale")
