"""Which modules a checkpoint's `quantization_config` leaves as they are, and checks of its keys."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxis.errors import ConfigError

WHERE = "quantization_config in config.json"
PATTERN_KEYS = ("modules_to_not_convert", "ignored_layers")


def unconverted_modules(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The patterns under either key that publishers use; without one, the head alone, as in transformers.

    Raises:
      ConfigError: Both keys are there, or the patterns are no list of regular expressions.
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
    """Whether a pattern is the name's end, or matches it from its start up to the end of one of its parts.

    So in transformers' `should_convert_module`: "layers.1" is not "layers.11", "mlp.gate" is not "mlp.gate_proj".
    """
    boundary = r"(?:(?<=\.)|(?=\.|$))"
    return any(re.match(f"(?:{pattern}){boundary}", name) or name.endswith(pattern) for pattern in patterns)


def check_keys(value: object, known: Mapping[str, tuple[Any, ...] | None], where: str) -> None:
    """Raises ConfigError for a key that is not known, or a value that is not among its own (None: any)."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} is {value!r}, expected an object")
    for key, setting in value.items():
        if key not in known:
            raise ConfigError(f"{where} has the key {key!r}, which is not supported")
        allowed = known[key]
        if allowed is not None and setting not in allowed:
            raise ConfigError(f"{where}: {key}={setting!r} is not supported; supported: {allowed[0]!r}")
