"""Takes keys and images out of a request before it is written down."""

from __future__ import annotations

import re
from typing import Any

REMOVED = "[removed]"
_SECRET_NAMES = re.compile(
    r"(api|access|auth|secret|private)[-_]?(key|token)|authorization([-_]?token)?|password|secret", re.IGNORECASE
)
# Keys that `jaxis new-key` made, and those of the services whose formats are well known.
_SECRET_TEXT = re.compile(r"\b(jaxis-|sk-|hf_|ghp_|AKIA|xox[abp]-)[A-Za-z0-9_-]{16,}|\bBearer\s+[A-Za-z0-9._~+/=-]{8,}")
_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)?(;[\w=.+-]+)*,[A-Za-z0-9+/=_%-]*")
# An image, a sound or a file as base64: longer, and without spaces, than words and code are.
_BASE64 = re.compile(r"(?<![A-Za-z0-9+/_-])[A-Za-z0-9+/_-]{512,}={0,2}")


def redacted(value: Any) -> Any:
    """A JSON value without keys, images and other data in base64; the rest is as it was."""
    if isinstance(value, str):
        return _redacted_text(value)
    if isinstance(value, list):
        return [redacted(item) for item in value]
    if isinstance(value, dict):
        return {
            name: REMOVED if isinstance(item, str) and _SECRET_NAMES.fullmatch(name) else redacted(item)
            for name, item in value.items()
        }
    return value


def _redacted_text(text: str) -> str:
    if len(text) < 16:
        return text
    text = _DATA_URL.sub(lambda match: f"[data of type {match[1] or 'text/plain'}, {len(match[0])} characters]", text)
    text = _BASE64.sub(lambda match: f"[base64 of {len(match[0])} characters]", text)
    return _SECRET_TEXT.sub(REMOVED, text)
