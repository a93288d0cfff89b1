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
    return _references().get(model_type) if isinstance(model_type, str) else None


@functools.cache
def model_types_of(architecture: str) -> tuple[str, ...]:
    """Returns the model types whose checkpoints have this architecture; empty if it is not built in."""
    name = SAME_CODE.get(architecture, architecture)
    return tuple(model_type for model_type, reference in _references().items() if name in reference.architectures)


@functools.cache
def keys_of_other_families() -> frozenset[str]:
    """Returns every key that the code of any decoder of the reference reads."""
    return frozenset(_data()["other_keys"])


@functools.cache
def _references() -> dict[str, FamilyReference]:
    data = _data()
    references = {
        model_type: FamilyReference(
            tuple(architectures),
            data["keys"][model_type],
            data["aliases"].get(model_type, {}),
            frozenset(data["nulls"].get(model_type, ())),
        )
        for model_type, architectures in data["architectures"].items()
    }
    return references | {name: references[other] for name, other in SAME_CODE.items() if other in references}


@functools.cache
def _data() -> dict[str, Any]:
    return json.loads(_DATA.read_text("utf-8"))
