"""JSON objects: strict reading of a checkpoint's, and the text of those that jaxis prints."""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxis.errors import CheckpointError

MAX_JSON_BYTES = 64 << 20  # the index of the largest checkpoints has some 20 MB


def parse_json_object(text: bytes, source: str) -> dict[str, Any]:
    """Parses UTF-8 JSON whose top level is an object and whose objects repeat no key.

    Raises CheckpointError for anything else; `source` names the JSON, e.g. `/models/a/config.json`.
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


def read_json_object(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Reads a file of at most `max_bytes` as `parse_json_object` does.

    Raises CheckpointError if it is no file, as a pipe or a device is not, is too large, or cannot be read or parsed.
    """
    try:
        status = path.stat()  # before anything is opened: to open a pipe may wait for ever
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path} is not a file: download it again")
        if status.st_size > max_bytes:
            raise CheckpointError(f"{path} has {status.st_size} bytes, expected at most {max_bytes}: download it again")
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    return parse_json_object(text, str(path))


def json_object_text(facts: Mapping[str, object]) -> str:
    """Returns an object as indented text; infinities and NaN, which JSON lacks, are strings."""
    return json.dumps(json.loads(json.dumps(facts), parse_constant=str), indent=2)
