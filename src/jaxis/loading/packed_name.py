from __future__ import annotations

import os
from pathlib import Path

PACKED = "packed.safetensors"
"""File of a packed folder; see the room `packed`."""


def is_packed(path: str | os.PathLike[str]) -> bool:
    return (Path(path) / PACKED).exists()
