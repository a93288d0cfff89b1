"""Ids for tool calls that the model wrote without one."""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import Any

from jaxis.parsing.parser_events import ToolCall

GENERATED_PREFIX = "call_"
_GENERATED = re.compile(GENERATED_PREFIX + r"[0-9a-f]{24}")


def new_call_id() -> str:
    return f"{GENERATED_PREFIX}{secrets.token_hex(12)}"


def is_generated(call_id: str) -> bool:
    """Returns whether an id was made by `new_call_id` rather than by the model."""
    return _GENERATED.fullmatch(call_id) is not None


def call_fields(call: ToolCall, seed: str) -> dict[str, Any]:
    """Returns a call in OpenAI's format. An id that the model did not write depends only on the seed."""
    derived = f"{GENERATED_PREFIX}{hashlib.sha256(seed.encode()).hexdigest()[:24]}"
    return {
        "id": derived if is_generated(call.id) else call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
