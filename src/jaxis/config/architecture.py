"""Choice of the model class for a config.json: its `architectures`, which its `model_type` must not contradict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxis.config.hf_config import HFConfig
from jaxis.config.reference import model_types_of, reference_of
from jaxis.errors import ConfigError


def architectures_of(config: HFConfig) -> list[str]:
    """Returns the names in `architectures`; without them, the reference's class for the `model_type`.

    Raises ConfigError if `architectures` is no list of names, or is missing and does not follow from `model_type`.
    """
    names = config.get("architectures")
    if not names:
        names = _reference_architectures(config) or config["architectures"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise config.fault("architectures", why="expected a list of names: correct the file")
    return names


def check_model_type(config: HFConfig, architecture: str) -> None:
    """Raises a ConfigError if `model_type` is not one of a built-in architecture's: their computations differ."""
    model_type, expected = config.get("model_type"), model_types_of(architecture)
    if model_type is None or not expected or model_type in expected:
        return
    reference = reference_of(model_type)
    stands_for = f", which is {' or '.join(reference.architectures)}" if reference is not None else ""
    wanted = " or ".join(map(repr, expected))
    raise ConfigError(
        f"{config.source} has the architecture {architecture!r}, whose model_type is {wanted}, but "
        f"model_type={model_type!r}{stands_for}: correct the file, or give hf_overrides={{'model_type': "
        f"{expected[0]!r}}} if the weights are of that type",
        keys=["model_type"],
    )


def _reference_architectures(config: Mapping[str, Any]) -> list[str]:
    """Returns the reference's architecture for the `model_type`; the last one if there is a `text_config`."""
    reference = reference_of(config.get("model_type"))
    if reference is None:
        return []
    return [reference.architectures[-1 if "text_config" in config else 0]]
