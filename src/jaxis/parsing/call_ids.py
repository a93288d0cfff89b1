"""Ids for tool calls that the model wrote without one."""

from __future__ import annotations

import hashlib
import re
import secrets

GENERATED_PREFIX = "call_"
_GENERATED = re.compile(GENERATED_PREFIX + r"[0-9a-f]{24}")


def new_call_id() -> str:
    return f"{GENERATED_PREFIX}{secrets.token_hex(12)}"


def derived_call_id(seed: str) -> str:
    """An id that is the same each time for the same seed."""
    return f"{GENERATED_PREFIX}{hashlib.sha256(seed.encode()).hexdigest()[:24]}"


def is_generated(call_id: str) -> bool:
    """Returns whether an id was made by `new_call_id` rather than by the model."""
    return _GENERATED.fullmatch(call_id) is not None
