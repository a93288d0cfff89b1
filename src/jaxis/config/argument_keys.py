"""Check of the keys of arguments that are JSON objects."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from jaxis.errors import ConfigError
from jaxis.nearest_name import did_you_mean


def check_keys(name: str, given: object, known: Collection[str]) -> None:
    """Raises a ConfigError unless an argument is a dict, all of whose keys are known."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"{name}={given!r} must be a dict")
    for key in given:
        if key not in known:
            hint = did_you_mean(str(key), known)
            raise ConfigError(f"{name} has the unknown key {key!r}; known: {', '.join(known)}{hint}")
