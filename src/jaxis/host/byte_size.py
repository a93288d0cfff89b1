"""Parses and writes human-readable byte sizes."""

from __future__ import annotations

import re

from jaxis.errors import ConfigError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)


def parse_bytes(size: int | str, name: str) -> int:
    """Parses a number of bytes from an integer, or from a string such as "512MiB" or "2G"; K, M, G, T are powers of
    1024.

    Raises ConfigError, with the `name` of the argument or option, if the size is invalid, or less than one byte.
    """
    num_bytes = 0
    if isinstance(size, str):
        match = _SIZE.fullmatch(size.strip())
        if match is not None:
            num_bytes = int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))
    elif isinstance(size, int) and not isinstance(size, bool):
        num_bytes = size
    if num_bytes < 1:
        raise ConfigError(f"{name}={size!r} must be a number of bytes, or a size such as '2GiB'")
    return num_bytes


def human_bytes(nbytes: float) -> str:
    """Formats a number of bytes with about three digits: "576 B", "68.6 KiB", "1250.0 GiB"."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} GiB"
