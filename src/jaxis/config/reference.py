"""Keys of config.json that transformers' code of each model type reads.

`reference_keys.json` holds them; tools/reference_keys.py writes that file from an installed transformers.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxis.config.usual_keys import SAME_CODE

_DATA = Path(__file__).with_name("reference_keys.json")


@dataclass(frozen=True)
class FamilyReference:
    """The reference's code of one model type.

    Attributes:
      architectures: Names in its checkpoints' `architectures`, of those that jaxis implements.
      defaults: Each key that the code reads -> its default; None is null, nothing, or a value that follows from other
        keys.
      aliases: Another name of a key -> the key.
      nulls: Keys with a default that null overrides. For all others null is the same as a missing key.
    """

    architectures: tuple[str, ...]
    defaults: Mapping[str, Any]
    aliases: Mapping[str, str]
    nulls: frozenset[str]


def reference_of(model_type: object) -> FamilyReference | None:
    """Returns the reference's code of config.json's `model_type`; None if no built-in family has the type."""
    return _reference(model_type) if isinstance(model_type, str) else None


@functools.cache
def model_types_of(architecture: str) -> tuple[str, ...]:
    """Returns the model types whose checkpoints have this architecture; empty if it is not built in."""
    name = SAME_CODE.get(architecture, architecture)
    names = dict.fromkeys([*_data()["architectures"], *SAME_CODE])
    return tuple(each for each in names if (found := _reference(each)) is not None and name in found.architectures)


@functools.cache
def keys_of_other_families() -> frozenset[str]:
    """Returns every key that the code of any decoder of the reference reads."""
    return frozenset(_data()["other_keys"])


@functools.cache
def _reference(model_type: str) -> FamilyReference | None:
    data = _data()
    if (other := SAME_CODE.get(model_type, "")) in data["architectures"]:
        model_type = other
    if model_type not in data["architectures"]:
        return None
    return FamilyReference(
        tuple(data["architectures"][model_type]),
        data["keys"][model_type],
        data["aliases"].get(model_type, {}),
        frozenset(data["nulls"].get(model_type, ())),
    )


@functools.cache
def _data() -> dict[str, Any]:
    return json.loads(_DATA.read_text("utf-8"))
