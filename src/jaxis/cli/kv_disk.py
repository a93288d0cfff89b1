"""`jaxis serve --kv-disk [SIZE]`: one option that turns on the KV cache on disk, with its size, folder and memory."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxis.errors import ConfigError
from jaxis.host.byte_size import human_bytes, parse_bytes
from jaxis.host.cache_folder import cache_folder

OPTION = "--kv-disk"
AUTO = "auto"
"""Size of an option that is given without one."""
# Share of the disk's free bytes and the folder's own, and its maximum.
_DISK_SHARE, _MAX_DISK_BYTES = 0.25, 100 << 30
# Share of the free memory, through which blocks from disk pass. The maximum is what the longest usual contexts take.
_MEMORY_SHARE, _MAX_MEMORY_BYTES = 0.125, 8 << 30
_MIN_MEMORY_GIB = 1 / 64


def with_size(args: list[str]) -> list[str]:
    """Returns a command's arguments, with `auto` where no size follows `--kv-disk`."""
    found = []
    for i, arg in enumerate(args):
        has_size = args[i + 1 : i + 2] and _is_size(args[i + 1])
        found.append(f"{OPTION}={AUTO}" if arg == OPTION and not has_size else arg)
    return found


def kv_disk_arguments(size: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the engine's arguments for the KV cache on disk; none without the option.

    Args:
      size: Most bytes of all files, or "auto": a quarter of the free ones, at most 100 GiB. None is without the option.
      given: Given arguments of the engine, of which `kv_offloading_dir` and `kv_offloading_size` stay.

    Raises:
      ConfigError: The size is invalid, or the disk cannot be examined.
    """
    if size is None:
        return {}
    folder = Path(given.get("kv_offloading_dir") or default_folder())
    num_bytes = _share_of_disk(folder) if size == AUTO else parse_bytes(size, OPTION)
    arguments: dict[str, Any] = {"kv_offloading_dir": str(folder), "kv_offloading_disk_size": num_bytes}
    if given.get("kv_offloading_size") is None:
        arguments["kv_offloading_size"] = _memory_gib()
    return arguments


def kv_disk_line(arguments: Mapping[str, Any]) -> str | None:
    """Returns the line about it that the server prints at the start; None if there are no files."""
    if (folder := arguments.get("kv_offloading_dir")) is None:
        return None
    size = human_bytes(parse_bytes(arguments["kv_offloading_disk_size"], OPTION))
    return (
        f"disk:   at most {size} of keys and values, which tell what prompts said, in {folder} (only you can read it)"
    )


def default_folder() -> Path:
    """Returns the folder of blocks if none is given."""
    return cache_folder() / "kv"


def _is_size(arg: str) -> bool:
    try:
        parse_bytes(arg, OPTION)
    except ConfigError:
        return arg == AUTO
    return True


def _share_of_disk(folder: Path) -> int:
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        held = sum(file.stat().st_size for file in folder.glob("*/*.kv"))
        free = shutil.disk_usage(existing).free
    except OSError as error:
        raise ConfigError(f"{OPTION}: {existing} cannot be looked at ({error.strerror}): give a size") from None
    return max(1, min(int((free + held) * _DISK_SHARE), _MAX_DISK_BYTES))


def _memory_gib() -> float:
    from jaxis.engine.execution.cache_memory import free_host_bytes

    return max(_MIN_MEMORY_GIB, min(free_host_bytes() * _MEMORY_SHARE, _MAX_MEMORY_BYTES) / (1 << 30))
