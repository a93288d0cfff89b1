"""Usual names and defaults of keys that config.json files of some model types name otherwise or omit.

The families declare them. `family_keys.json` has these declarations, so that a config is read without JAX;
`python -m tools.supported_models` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_DECLARED = json.loads(Path(__file__).with_name("family_keys.json").read_text("utf-8"))
CONFIG_DEFAULTS: Mapping[str, Mapping[str, Any]] = _DECLARED["defaults"]
"""Defaults of all families, as in `Family.defaults`."""
USUAL_KEYS: Mapping[str, Mapping[str, str]] = _DECLARED["names"]
"""Own names of all families, as in `Family.names`."""

SAME_CODE: Mapping[str, str] = _DECLARED["same_code"]
"""Model types and architectures of all families, as in `Family.same_code`."""


def with_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a parsed config.json, or an object in one, under the usual names of keys (USUAL_KEYS).

    Missing keys are set to the defaults of its `model_type`. A key that stands there under both names keeps them.
    """
    usual = own_names(values)
    named = {key if usual.get(key) in values else usual.get(key, key): value for key, value in values.items()}
    return {**CONFIG_DEFAULTS.get(str(values.get("model_type")), {}), **named}


def own_names(values: Mapping[str, Any]) -> Mapping[str, str]:
    """Returns a config's own names of keys -> the usual ones: those of its `model_type`, else of its architecture."""
    architectures = values.get("architectures")
    first = architectures[0] if isinstance(architectures, list) and architectures else None
    return USUAL_KEYS.get(str(values.get("model_type") or first), {})
