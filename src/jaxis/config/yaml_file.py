"""YAML files of settings, with errors of one line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from jaxis.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """YAML loader that reads 1e-5 as a number; in YAML 1.1 it is a string."""


_Loader.yaml_implicit_resolvers = {
    first: [*resolvers] for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def parse_yaml(text: str, what: str) -> Any:
    """Parses YAML; raises ConfigError with one line if it is invalid. `what` names the text in the error."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{what} is not YAML: {' '.join(str(error).split())}") from None


def read_yaml_mapping(path: str | Path) -> dict[str, Any]:
    """Reads a YAML file. Raises ConfigError if it cannot be read, or is not a mapping."""
    try:
        text = Path(path).read_text("utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text") from None
    value = parse_yaml(text, str(path))
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds no configuration: it needs sections such as `model:`")
    return value
