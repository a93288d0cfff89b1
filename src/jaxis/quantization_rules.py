"""The argument `quantization`: a name, rules in Qwix's format, or a file with rules.

JAX is not imported, so that a request can be checked before an engine process is started.

The first rule whose `module_path` matches a module's whole dotted name decides; the weights of a module that no rule
matches, or whose rule has no `weight_qtype`, stay as they are. Modules are those with weight matrices: linear layers,
embeddings, heads, and the experts of a layer, which count as one (`model.layers.0.mlp.experts`).
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxis.errors import ConfigError
from jaxis.nearest_name import did_you_mean

CALIBRATION_METHODS = {
    "int8": ("absmax",),
    "int6": ("affine",),
    "int5": ("affine",),
    "int4": ("absmax", "minmax", "mse", "affine"),
}
"""Type of weights -> possible methods of choosing their scales."""
QTYPES = tuple(CALIBRATION_METHODS)
ACT_QTYPES = ("int8",)
DEQUANTIZE = "dequantize"
_ADDITIONAL_KEYS = ("quantization",)


@dataclasses.dataclass(frozen=True)
class QuantizationRule:
    """One rule.

    Attributes:
      module_path: Regular expression for the whole dotted name of a module, such as `model.layers.0.mlp.up_proj`.
      weight_qtype: "int8", "int6", "int5", "int4", or None to leave the weights of the matching modules as they are.
      act_qtype: "int8" quantizes the modules' input dynamically, with one scale per token and group; None does not. A
        rule without `weight_qtype` applies to checkpoints that are quantized already.
      tile_size: Input features of a weight that share a scale; None means all of them.
      weight_calibration_method: "absmax"; "affine" (a scale and a minimum to a group, of the least squared error; int4,
        int5 and int6); "minmax" (int4 with zero points); or "mse" (int4 without, least squared error).

    Raises:
      ConfigError: On construction, if a value is unknown or has the wrong type, or they are inconsistent.
    """

    module_path: str = ".*"
    weight_qtype: str | None = None
    act_qtype: str | None = None
    tile_size: int | None = None
    weight_calibration_method: str = "absmax"

    def __post_init__(self) -> None:
        if not isinstance(self.module_path, str):
            raise ConfigError(f"module_path={self.module_path!r} must be a regular expression")
        try:
            re.compile(self.module_path)
        except re.error as error:
            raise ConfigError(f"module_path={self.module_path!r} is not a regular expression: {error}") from None
        for name, known in (
            ("weight_qtype", (None, *QTYPES)),
            ("act_qtype", (None, *ACT_QTYPES)),
            ("weight_calibration_method", sorted({name for names in CALIBRATION_METHODS.values() for name in names})),
        ):
            if (value := getattr(self, name)) not in known:
                raise ConfigError(f"{name}={value!r} is not supported; known: {', '.join(map(str, known))}")
        if self.tile_size is not None and (type(self.tile_size) is not int or self.tile_size < 1):
            raise ConfigError(f"tile_size={self.tile_size!r} must be an integer of at least 1")
        if self.weight_qtype is None:
            if self.tile_size is not None or self.weight_calibration_method != "absmax":
                raise ConfigError(f"the rule for {self.module_path!r} says how to quantize, but has no weight_qtype")
        elif self.weight_calibration_method not in (known := CALIBRATION_METHODS[self.weight_qtype]):
            raise ConfigError(
                f"weight_calibration_method={self.weight_calibration_method!r} is not for {self.weight_qtype}, which "
                f"has {', '.join(map(repr, known))}"
            )


_INT8 = QuantizationRule(".*", "int8", "int8", 32)
SHORT_NAMES: dict[str, tuple[QuantizationRule, ...]] = {
    "none": (),
    "int8": (_INT8,),
    # Embeddings and head lose more accuracy to int4 than the layers, and are read only once per token.
    "int4": (
        dataclasses.replace(_INT8, module_path=r"(.*\.)?(embed_tokens|embeddings|word_embeddings|lm_head)"),
        QuantizationRule(".*", "int4", "int8", 32, "affine"),
    ),
    "int8_activations": (QuantizationRule(".*", act_qtype="int8"),),
}


@dataclasses.dataclass(frozen=True)
class RequestedQuantization:
    """Request of `EngineArgs`' `quantization` and `additional_config`.

    Attributes:
      rules: Rules for an unquantized checkpoint, in order.
      rules_must_match: True if a rule that applies to no module is an error.
      dequantize: True dequantizes a quantized checkpoint to the model's data type; there are then no rules.
    """

    rules: tuple[QuantizationRule, ...] = ()
    rules_must_match: bool = True
    dequantize: bool = False


def parse_requested_quantization(
    quantization: object, additional_config: Mapping[str, Any] | None = None
) -> RequestedQuantization | None:
    """Parses the user's request; None if nothing is requested.

    Args:
      quantization: One of SHORT_NAMES, "dequantize", a list of rules, {"qwix": {"rules": [...]}}, or the path of a YAML
        or JSON file with one of the last two.
      additional_config: Its "quantization" may have the same values, except for a name.

    Raises:
      ConfigError: One of them cannot be read, or both ask for something.
    """
    additional = _additional_quantization(additional_config)
    if quantization is not None and additional is not None:
        raise ConfigError("quantization and additional_config['quantization'] were both given: leave one out")
    if additional is not None:
        return RequestedQuantization(rules_from(additional, "additional_config['quantization']"))
    if quantization is None:
        return None
    if isinstance(quantization, str | os.PathLike):
        name = os.fspath(quantization)
        if name == DEQUANTIZE:
            return RequestedQuantization(dequantize=True)
        if name in SHORT_NAMES:
            return RequestedQuantization(SHORT_NAMES[name], rules_must_match=False)
        return RequestedQuantization(rules_from(_read_rules(name), name))
    return RequestedQuantization(rules_from(quantization, "quantization"))


def _additional_quantization(additional_config: Mapping[str, Any] | None) -> Any:
    if additional_config is None:
        return None
    if not isinstance(additional_config, Mapping):
        raise ConfigError(f"additional_config={additional_config!r} must be a dict")
    for key in additional_config:
        if key not in _ADDITIONAL_KEYS:
            known = ", ".join(_ADDITIONAL_KEYS)
            raise ConfigError(f"additional_config has the unknown key {key!r}; known: {known}")
    return additional_config.get("quantization")


def rules_from(value: object, source: str) -> tuple[QuantizationRule, ...]:
    """Reads rules from a parsed JSON or YAML value: a list of rules, or {"qwix": {"rules": [...]}}.

    Args:
      value: The value.
      source: Beginning of error messages, which names the value.

    Raises:
      ConfigError: A key, type or value is unknown.
    """
    if isinstance(value, Mapping):
        value = _only_key(_only_key(value, "qwix", source), "rules", f"{source}: qwix")
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ConfigError(f"{source} must be a list of quantization rules, or {{'qwix': {{'rules': [...]}}}}")
    return tuple(_rule_from(rule, f"{source}: rule {number}") for number, rule in enumerate(value, 1))


def rules_to_dict(rules: Sequence[QuantizationRule]) -> dict[str, Any]:
    """Returns the inverse of `rules_from`; leaves out defaults."""
    fields = dataclasses.fields(QuantizationRule)
    return {
        "qwix": {
            "rules": [
                {"module_path": rule.module_path}
                | {f.name: getattr(rule, f.name) for f in fields if getattr(rule, f.name) != f.default}
                for rule in rules
            ]
        }
    }


def _rule_from(rule: object, source: str) -> QuantizationRule:
    if isinstance(rule, QuantizationRule):
        return rule
    known = [field.name for field in dataclasses.fields(QuantizationRule)]
    if not isinstance(rule, Mapping):
        raise ConfigError(f"{source} is {rule!r}, not an object with {', '.join(known)}")
    for key in rule:
        if key not in known:
            raise ConfigError(
                f"{source} has the unknown key {key!r}; known: {', '.join(known)}{did_you_mean(str(key), known)}"
            )
    if "module_path" not in rule:
        raise ConfigError(f"{source} has no module_path: give the modules' names as a regular expression, '.*' for all")
    try:
        return QuantizationRule(**rule)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def _only_key(value: object, key: str, source: str) -> Any:
    if not isinstance(value, Mapping) or list(value) != [key]:
        found = ", ".join(map(repr, value)) if isinstance(value, Mapping) else repr(value)
        raise ConfigError(f"{source} must be an object with the one key {key!r}, but has {found or 'none'}")
    return value[key]


def read_mapping(text: str, what: str) -> dict[str, Any]:
    """Reads an object given as JSON, or as the path of a JSON or YAML file.

    Raises:
      ConfigError: The text is neither.
    """
    if text.lstrip().startswith("{"):
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{what} is not valid JSON: {error}") from None
    elif os.path.isfile(text):
        value = _read_yaml(text)
    else:
        raise ConfigError(f"{what}={text!r} is neither a JSON object nor an existing file")
    if not isinstance(value, dict):
        raise ConfigError(f"{what} must be an object, but {text} holds {value!r}")
    return value


def _read_rules(name: str) -> Any:
    if not os.path.isfile(name):
        names = [*SHORT_NAMES, DEQUANTIZE]
        raise ConfigError(
            f"quantization={name!r} is neither one of {', '.join(names)} nor an existing YAML or JSON file"
            f"{did_you_mean(name, names)}"
        )
    return _read_yaml(name)


def _read_yaml(path: str) -> Any:
    # JSON is YAML too. Imported here because most runs do not need it.
    import yaml

    try:
        return yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
