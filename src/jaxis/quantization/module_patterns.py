"""Reads which modules a checkpoint's `quantization_config` leaves unquantized, and checks its keys."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxis.errors import ConfigError

WHERE = "quantization_config in config.json"
PATTERN_KEYS = ("modules_to_not_convert", "ignored_layers")


def unconverted_modules(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The patterns of unquantized modules, under either key in use; by default only the head, as in transformers.

    Raises:
      ConfigError: Both keys are present, or the patterns are not a list of regular expressions.
    """
    given = {key: config[key] for key in PATTERN_KEYS if config.get(key) is not None}
    if len(given) > 1:
        raise ConfigError(f"{WHERE} has both {' and '.join(PATTERN_KEYS)}: remove one")
    if not given:
        return ("lm_head",)
    [(key, patterns)] = given.items()
    if not isinstance(patterns, list | tuple) or not all(isinstance(pattern, str) for pattern in patterns):
        raise ConfigError(f"{WHERE}: {key}={patterns!r} must be a list of names")
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"{WHERE}: {key} has {pattern!r}, which is not a regular expression: {error}") from None
    return tuple(patterns)


def is_unconverted(name: str, patterns: Sequence[str]) -> bool:
    """Whether the name ends with a pattern, or a pattern matches from its start to the end of one of its parts.

    As in transformers' `should_convert_module`: "layers.1" is not "layers.11", "mlp.gate" is not "mlp.gate_proj".
    """
    boundary = r"(?:(?<=\.)|(?=\.|$))"
    return any(re.match(f"(?:{pattern}){boundary}", name) or name.endswith(pattern) for pattern in patterns)


def check_keys(value: object, known: Mapping[str, tuple[Any, ...] | None], where: str) -> None:
    """Raises ConfigError for an unknown key, or a value that is not among the key's values (None: any)."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} is {value!r}, expected an object")
    for key, setting in value.items():
        if key not in known:
            raise ConfigError(f"{where} has the key {key!r}, which is not supported")
        allowed = known[key]
        if allowed is not None and setting not in allowed:
            raise ConfigError(f"{where}: {key}={setting!r} is not supported; supported: {allowed[0]!r}")
