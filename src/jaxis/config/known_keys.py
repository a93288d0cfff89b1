"""Arguments that are JSON objects, each with keys that are known."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from jaxis.errors import ConfigError


def check_keys(name: str, given: object, known: Collection[str]) -> None:
    """Raises a ConfigError unless an argument is a dict, all of whose keys are known."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"{name}={given!r} must be a dict")
    for key in given:
        if key not in known:
            raise ConfigError(f"{name} has the unknown key {key!r}; known: {', '.join(known)}")
