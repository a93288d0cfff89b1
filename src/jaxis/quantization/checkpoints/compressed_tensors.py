"""Checkpoints in compressed-tensors' formats.

Source: https://github.com/vllm-project/compressed-tensors. config.json's `quantization_config` has groups of settings,
each with its target modules: by name, by `re:` and a regular expression, or by class. `compressed_tensors_groups` reads
the groups. Settings that are not implemented are errors that name them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxis.config.quantization import QuantizationConfig
from jaxis.errors import ConfigError
from jaxis.kernels.weights import WeightScheme
from jaxis.layers.embed import JaxEmbed
from jaxis.layers.experts import JaxExperts
from jaxis.layers.weight_format import WeightFormat
from jaxis.layers.weight_method import WeightedLayer, WeightMethod
from jaxis.loading.safetensors import TensorInfo
from jaxis.quantization.checkpoint_format import CheckpointFormat, Choice, Stored
from jaxis.quantization.compressed_tensors_groups import integer_format, read_group, scheme_of
from jaxis.quantization.module_patterns import WHERE, ModuleList, check_keys, names_of
from jaxis.quantization.rules import RuleQuantizationConfig, weight_scheme
from jaxis.quantization.stored import StoredConfig, stored_as
from jaxis.quantization.tensor_names import TensorNames
from jaxis.quantization.wrappers import Dequantize, DequantizingConfig, QuantizedActivationsConfig
from jaxis.quantization_rules import rules_from

RULES_KEY = "jaxis_quantization"
"""Key of config.json under which `jaxis quantize` stores its rules: they decide which activations to quantize."""

# Key -> the values with which it has no effect, or None if no value has one or it is read below.
_CONFIG_KEYS: dict[str, tuple[Any, ...] | None] = {
    **dict.fromkeys(("quant_method", "config_groups", "format", "ignore", "sparsity_config", "transform_config")),
    **dict.fromkeys(("global_compression_ratio", "version")),
    # The cache is quantized or not as the engine's arguments say.
    "kv_cache_scheme": None,
    "quantization_status": ("compressed",),
    "moe_sparsity_config": (None, {}),
}
_OFFLINE_LOCATIONS = ("weight_input", "weight_output")


class CompressedTensorsConfig(StoredConfig):
    """A `quantization_config` whose `quant_method` is "compressed-tensors". A QuantizationConfig.

    `rules` decide which activations are quantized, overriding the groups' `input_activations`. Raises ConfigError if
    the object asks for something that is not implemented.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        rules: RuleQuantizationConfig | None = None,
        tensors: Mapping[str, TensorInfo] | None = None,
    ) -> None:
        check_keys(config, _CONFIG_KEYS, WHERE)
        _check_sparsity(config.get("sparsity_config"))
        _check_transforms(config.get("transform_config"))
        groups = config.get("config_groups")
        if not isinstance(groups, Mapping) or not groups:
            raise ConfigError(f"{WHERE} has no config_groups")
        self._groups = [read_group(group, config.get("format"), f"{WHERE}: {name}") for name, group in groups.items()]
        self._ignore = ModuleList(names_of(config.get("ignore"), "ignore"), "ignore")
        lists = (self._ignore, *(group.targets for group in self._groups))
        super().__init__([target for modules in lists for target in modules.targets], TensorNames(), tensors)
        self._rules = rules

    def format_of(self, layer: WeightedLayer, names: Sequence[str]) -> WeightFormat | None:
        """Finds the format. Names come before regular expressions, and those before classes."""
        classes = self._classes_of(layer)
        if self._ignore.has_name(names) or self._ignore.has_match(names) or self._ignore.has_class(classes):
            return None
        for is_target in (
            lambda targets: targets.has_name(names),
            lambda targets: targets.has_match(names),
            lambda targets: targets.has_class(classes),
        ):
            if group := next((group for group in self._groups if is_target(group.targets)), None):
                return group.format
        return None

    def get_quant_method(self, layer: WeightedLayer, prefix: str) -> WeightMethod | None:
        if self._rules is None:
            return super().get_quant_method(layer, prefix)
        formats = self.stored_formats(layer, prefix)
        schemes = [scheme_of(each) for each in formats.values()]
        if None in schemes or any(scheme != schemes[0] for scheme in schemes):
            raise ConfigError(
                f"{prefix} is stored in a format of low-precision floats or codes and cannot be quantized again: leave "
                "quantization out"
            )
        rule, stored = weight_scheme(self._rules.find(prefix)), schemes[0] if schemes else None
        scheme = _with_activations_of(rule, stored, prefix)
        return None if scheme is None else stored_as(dict.fromkeys(formats, integer_format(scheme)), layer, prefix)

    def _classes_of(self, layer: WeightedLayer) -> tuple[str, ...]:
        """Returns the layer's class names in PyTorch and in engines, which groups refer to."""
        if isinstance(layer, JaxEmbed):
            return ("Embedding",)
        if isinstance(layer, JaxExperts):
            return ("FusedMoE", "Linear", *(target for target in self._patterns if target.endswith("Experts")))
        return ("Linear",)

    def check_all_used(self) -> None:
        """Checks the rules only: the file's own targets may name modules that the model does not have."""
        if self._rules is not None:
            self._rules.check_all_used()


def _check_sparsity(config: Any) -> None:
    """Raises ConfigError if the weights are stored without their zeros."""
    stored = config.get("format") if isinstance(config, Mapping) else config
    if stored not in (None, "dense"):
        raise ConfigError(
            f"{WHERE}: sparsity_config has the format {stored!r}, and sparse weights are not supported: use a "
            "checkpoint of the same model without sparsity"
        )


def _check_transforms(config: Any) -> None:
    """Raises ConfigError if weights are only right for activations that are transformed first."""
    if config is None or config == {}:
        return
    check_keys(config, {"config_groups": None}, f"{WHERE}: transform_config")
    groups = config.get("config_groups")
    for name, scheme in (groups if isinstance(groups, Mapping) else {"": groups}).items():
        where = f"{WHERE}: transform_config: {name}"
        uses = scheme.get("apply") if isinstance(scheme, Mapping) else None
        if not isinstance(uses, list) or not all(isinstance(use, Mapping) for use in uses):
            raise ConfigError(f"{where} is {scheme!r}, expected an object with a list `apply`")
        for use in uses:
            if use.get("location") not in _OFFLINE_LOCATIONS:
                raise ConfigError(
                    f"{where} transforms activations (location={use.get('location')!r}), which is not supported: use "
                    "a checkpoint of the same model without transforms, or whose transforms are all of weights "
                    f"({', '.join(_OFFLINE_LOCATIONS)})"
                )


def _with_activations_of(rule: WeightScheme | None, stored: WeightScheme | None, prefix: str) -> WeightScheme | None:
    """Returns the stored scheme with the rule's activations, if the two agree on the weight."""

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


def _read(stored: Stored, choice: Choice) -> QuantizationConfig:
    """Makes the config; the user's rules may name types of weights, if they are those that are stored."""
    if isinstance(choice, Dequantize):
        return DequantizingConfig(CompressedTensorsConfig(stored.settings, tensors=stored.tensors))
    if choice is not None and choice.keeps_weights:
        return QuantizedActivationsConfig(CompressedTensorsConfig(stored.settings, tensors=stored.tensors), choice)
    if choice is None and stored.rules is not None:
        choice = RuleQuantizationConfig(rules_from(stored.rules, f"{RULES_KEY} in config.json"), must_match=False)
    return CompressedTensorsConfig(stored.settings, choice, stored.tensors)


FORMATS = (CheckpointFormat(("compressed-tensors",), _read),)
