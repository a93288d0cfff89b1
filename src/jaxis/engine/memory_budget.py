"""What an engine may take of the memory that it shares with other engines of a server. No JAX here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryBudget:
    """The memory of a machine, and an engine's share.

    Neither depends on which other engines are there at the moment, so an engine is the same whenever it is loaded.

    Attributes:
      total_bytes: Main memory that is free without any of the engines; what decides how weights are stored.
      share_bytes: What the engine takes for weights and KV cache, unless its weights and the least useful cache, or
        the context or the cache that it was given, take more.
    """

    total_bytes: int
    share_bytes: int
