"""The share of memory of an engine that runs beside others in one server. Imports no JAX."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryBudget:
    """The memory of a machine, and an engine's share.

    Neither depends on which other engines are there at the moment, so an engine is the same whenever it is loaded.

    Attributes:
      total_bytes: Main memory that is free without any of the engines; it determines how weights are stored.
      share_bytes: Size of the engine's weights and KV cache. It is exceeded if the weights with the smallest useful
        cache, or with the requested context or cache, need more.
    """

    total_bytes: int
    share_bytes: int
