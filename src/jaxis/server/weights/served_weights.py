"""Weights of a server's engine: their version, updates, and sleep."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxis.engine.client.async_engine import AsyncEngine
from jaxis.engine.client.async_llm_engine import to_its_end
from jaxis.outputs import FIRST_VERSION

PARTS = frozenset({"weights", "kv_cache"})


class ServedWeights:
    """The weights of an engine, as one event loop changes them. An impossible change raises JaxisError.

    Attributes:
      version: Version of the weights; FIRST_VERSION until they are updated.
      is_update_started: True if an update was started and not finished.
      pending: Folder and version of the weights that will finish it; None until they are named.

    Args:
      engine: The engine.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._updates = asyncio.Lock()
        self._asleep: frozenset[str] = frozenset()
        self._num_restarts = 0  # when it was put to sleep
        self.version: str | int = FIRST_VERSION
        self.is_update_started = False
        self.pending: tuple[str, str | int | None] | None = None

    @property
    def is_asleep(self) -> bool:
        """True if the engine sleeps, and requests wait; one that was started again is awake."""
        return bool(self._asleep) and self._num_restarts == self._engine.num_restarts

    @to_its_end
    async def sleep(self, level: int) -> None:
        """Frees the caches and the device memory of the weights, as `LiveWeights.sleep` does."""
        await self._engine.call("sleep", level, returns=type(None))
        self._asleep, self._num_restarts = PARTS, self._engine.num_restarts

    @to_its_end
    async def wake_up(self, parts: Sequence[str] | None) -> None:
        """Restores weights and caches after `sleep`, as `LiveWeights.wake_up` does."""
        await self._change("wake_up", parts)
        self._asleep -= PARTS if parts is None else frozenset(parts)

    @to_its_end
    async def update(self, folder: str, version: str | int | None) -> None:
        """Gives the model the weights of a folder, as `LiveWeights.update` does."""
        # Weights are read while steps run. The lock keeps updates in the order of their calls.
        async with self._updates:
            await self._change("update_weights", folder, version)
        self._engine.repeat("weights", "update_weights", folder, self.version, is_vital=True)
        self._asleep -= {"weights"}

    async def _change(self, name: str, *arguments: Any) -> None:
        fingerprint, self.version = await self._engine.call(name, *arguments, returns=tuple[str, str | int])
        self._engine.info = dataclasses.replace(self._engine.info, fingerprint=fingerprint)
