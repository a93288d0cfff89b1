"""`jaxis serve --kv-disk [SIZE]`: the KV cache on disk with one word, which stands for a size, a folder and memory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxis.errors import ConfigError
from jaxis.host.byte_size import human_bytes, parse_bytes

OPTION = "--kv-disk"
AUTO = "auto"
"""The size that the option has without one."""
# Of the disk's free bytes and those that the folder holds, and at most.
_DISK_SHARE, _MAX_DISK_BYTES = 0.25, 100 << 30
# Of the free memory: blocks from disk pass through it. At most as much as the longest of usual contexts takes.
_MEMORY_SHARE, _MAX_MEMORY_BYTES = 0.125, 8 << 30
_MIN_MEMORY_GIB = 1 / 64


def with_size(args: list[str]) -> list[str]:
    """A command's arguments, with `auto` for a size where `--kv-disk` is followed by something else."""
    found = []
    for i, arg in enumerate(args):
        has_size = args[i + 1 : i + 2] and _is_size(args[i + 1])
        found.append(f"{OPTION}={AUTO}" if arg == OPTION and not has_size else arg)
    return found


def kv_disk_arguments(size: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's arguments for the KV cache on disk; none without the option.

    Args:
      size: Of all files, or "auto": a quarter of what is free, at most 100 GiB. None is without the option.
      given: The engine's arguments that were given, of which `kv_offloading_dir` and `kv_offloading_size` stay.

    Raises:
      ConfigError: It is not a size, or the disk cannot be looked at.
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
    """What the server says of it at the start; None if there are no files."""
    if (folder := arguments.get("kv_offloading_dir")) is None:
        return None
    size = human_bytes(parse_bytes(arguments["kv_offloading_disk_size"], OPTION))
    return (
        f"disk:   at most {size} of keys and values, which tell what prompts said, in {folder} (only you can read it)"
    )


def default_folder() -> Path:
    """Where blocks are kept if no folder is given."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(cache) / "jaxis" / "kv"


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
