"""What a user asks for: a name, a list of quantization rules, an object, or a file with one of the last two."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxis.errors import ConfigError
from jaxis.quantization.dequantized import Dequantize
from jaxis.quantization.rules import SHORT_NAMES, RuleQuantizationConfig, rules_from

ADDITIONAL_KEYS = ("quantization",)
DEQUANTIZE = "dequantize"


def parse_quantization(
    quantization: Any, additional_config: Mapping[str, Any] | None = None
) -> RuleQuantizationConfig | Dequantize | None:
    """What `LLM(quantization=..., additional_config=...)` asks for; None is nothing.

    Args:
      quantization: "int8", "int4", "none", "dequantize", a list of rules, {"qwix": {"rules": [...]}}, or the path of
        a YAML or JSON file with one of the last two.
      additional_config: May give the same, except for a name, as its "quantization".

    Raises:
      ConfigError: Neither is understood, or both say something.
    """
    if additional_config is not None:
        if not isinstance(additional_config, Mapping):
            raise ConfigError(f"additional_config={additional_config!r} must be a dict")
        for key in additional_config:
            if key not in ADDITIONAL_KEYS:
                raise ConfigError(f"additional_config has the unknown key {key!r}; known: {', '.join(ADDITIONAL_KEYS)}")
    additional = (additional_config or {}).get("quantization")
    if quantization is not None and additional is not None:
        raise ConfigError("quantization and additional_config['quantization'] were both given: leave one out")
    if additional is not None:
        return RuleQuantizationConfig(rules_from(additional, "additional_config['quantization']"))
    if quantization is None:
        return None
    if isinstance(quantization, str | os.PathLike):
        name = os.fspath(quantization)
        if name == DEQUANTIZE:
            return Dequantize()
        if name in SHORT_NAMES:
            return RuleQuantizationConfig(SHORT_NAMES[name], must_match=False)
        return RuleQuantizationConfig(rules_from(_read_rules(name), name))
    return RuleQuantizationConfig(rules_from(quantization, "quantization"))


def read_mapping(text: str, what: str) -> dict[str, Any]:
    """An object given as JSON, or as the path of a JSON or YAML file.

    Raises:
      ConfigError: It is neither.
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
        names = ", ".join([*SHORT_NAMES, DEQUANTIZE])
        raise ConfigError(f"quantization={name!r} is neither one of {names} nor an existing YAML or JSON file")
    return _read_yaml(name)


def _read_yaml(path: str) -> Any:
    # JSON is YAML too. Imported here: most runs read none.
    import yaml

    try:
        return yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
