"""generation_config.json: the sampling settings that a checkpoint's makers recommend."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from jaxis.errors import CheckpointError
from jaxis.host.json_object import read_json_object

GENERATION_KEYS = (
    *("bos_token_id", "eos_token_id", "pad_token_id", "do_sample", "temperature", "top_k", "top_p", "min_p"),
    *("repetition_penalty", "max_new_tokens", "min_new_tokens", "stop_strings"),
)
"""Keys of generation_config.json that `load_generation_defaults` returns."""
_TYPES_OF_GENERATION: dict[str, tuple[type, ...]] = {"do_sample": (bool,), "stop_strings": (str,)}


def load_generation_defaults(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads the sampling settings that a checkpoint's makers recommend, from `folder`/generation_config.json.

    Returns the settings among GENERATION_KEYS as the file has them (`eos_token_id` may be one id or a list, and
    `stop_strings` one string or a list); none without the file. Raises CheckpointError if the file is not a JSON
    object, or a setting has the wrong type.
    """
    path = Path(folder) / "generation_config.json"
    if not path.exists():
        return {}
    found = read_json_object(path)
    defaults = {key: found[key] for key in GENERATION_KEYS if found.get(key) is not None}
    for key, value in defaults.items():
        types = _TYPES_OF_GENERATION.get(key, (int,) if key.endswith("_token_id") else (int, float))
        settings = value if key in ("eos_token_id", "stop_strings") and isinstance(value, list) else [value]
        if not all(type(setting) in types for setting in settings):
            expected = " or ".join(kind.__name__ for kind in types)
            raise CheckpointError(f"{path} sets {key} to {value!r}, expected {expected}: correct the file")
    return defaults
