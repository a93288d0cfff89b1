"""Strict reading of the JSON objects that a checkpoint is made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxis.errors import CheckpointError


def parse_json_object(text: bytes, source: str) -> dict[str, Any]:
    """Parses UTF-8 JSON whose top level is an object and whose objects repeat no key.

    Args:
      text: The JSON.
      source: What the text is, for the error's first words, e.g. `/models/a/config.json`.

    Raises:
      CheckpointError: If the text is anything else.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ValueError(f"the key {key!r} appears twice in one object")
            found[key] = value
        return found

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{source} is not valid JSON ({error}): download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{source} must be a JSON object, but is a {type(value).__name__}: download it again")
    return value


def read_json_object(path: Path) -> dict[str, Any]:
    """Reads a file as `parse_json_object` does; a file that cannot be read is a CheckpointError too."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    return parse_json_object(text, str(path))
