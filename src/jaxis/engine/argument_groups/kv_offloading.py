"""Arguments of KV cache blocks in host memory and on disk."""

from __future__ import annotations

import functools
import math
import os
from dataclasses import dataclass
from typing import Literal

from jaxis.engine.argument_groups.combinations import EngineFeature
from jaxis.engine.argument_groups.info import ArgumentGroup, argument
from jaxis.errors import ConfigError
from jaxis.host.byte_size import parse_bytes

KVOffloadingBackend = Literal["native"]


@dataclass(frozen=True)
class KVOffloadingArguments(ArgumentGroup):
    """Sizes and places of blocks that the KV cache has no room for."""

    kv_offloading_size: float | str | None = argument(
        None,
        in_fingerprint=False,
        room="engine.kv_store",
        description=(
            "GiB of the host's memory for blocks that the KV cache has no room for; None is none. See [KV "
            "offloading](kv-cache.md)."
        ),
        metavar="GIB",
        help="Host memory for blocks that the KV cache has no room for (default: none).",
        speed_only=True,
    )
    kv_offloading_backend: KVOffloadingBackend = argument(
        "native",
        in_fingerprint=False,
        description='Implementation of the offloading: only "native"; accepted for vLLM\'s sake.',
        help="native.",
        speed_only=True,
    )
    kv_offloading_dir: str | os.PathLike[str] | None = argument(
        None,
        in_fingerprint=False,
        room="engine.kv_store",
        description="A folder where those blocks are kept too, over restarts; None is none.",
        metavar="FOLDER",
        help="Keep those blocks on disk, over restarts.",
        speed_only=True,
    )
    kv_offloading_disk_size: int | str = argument(
        "32GiB",
        in_fingerprint=False,
        description='Most bytes of all files there, or a size such as "100GiB".',
        metavar="SIZE",
        help="Most bytes on disk, such as 100GiB.",
        speed_only=True,
    )

    def check(self) -> None:
        _ = self.kv_offloading_disk_bytes
        if self.kv_offloading_bytes is None and self.kv_offloading_dir is not None:
            raise ConfigError("kv_offloading_dir needs kv_offloading_size: blocks from disk go into memory first")

    def features(self) -> dict[EngineFeature, tuple[bool, str]]:
        return {EngineFeature.KV_OFFLOADING: (self.kv_offloading_bytes is not None, "kv_offloading_size")}

    @functools.cached_property
    def kv_offloading_bytes(self) -> int | None:
        """`kv_offloading_size` in bytes."""
        if self.kv_offloading_size is None:
            return None
        try:
            gib = math.nan if isinstance(self.kv_offloading_size, bool) else float(self.kv_offloading_size)
        except (TypeError, ValueError):
            gib = math.nan
        if not 0 < gib < math.inf:
            raise ConfigError(
                f"kv_offloading_size={self.kv_offloading_size!r} must be a number of GiB, such as 8 or 0.5"
            )
        return int(gib * (1 << 30))

    @functools.cached_property
    def kv_offloading_disk_bytes(self) -> int:
        """`kv_offloading_disk_size` in bytes."""
        return parse_bytes(self.kv_offloading_disk_size, "kv_offloading_disk_size")
