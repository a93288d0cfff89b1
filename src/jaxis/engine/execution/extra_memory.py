"""The interface to device memory that a feature needs beside the model's weights and caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
from jax.typing import DTypeLike

from jaxis.engine.execution.executor import Executor
from jaxis.engine.execution.feature import RequestFeature
from jaxis.errors import EngineError
from jaxis.host.byte_size import human_bytes
from jaxis.layers.module import JaxModule


@dataclass(frozen=True)
class LeftOut:
    """Reason for which a feature of a checkpoint was left out.

    Attributes:
      reason: Reason and remedy, in one line; empty if the checkpoint has no such feature.
      is_chosen: True if the arguments or the model's files ask for it; otherwise the engine notes the reason.
    """

    reason: str
    is_chosen: bool


class ExtraMemory:
    """Device memory that is planned with the weights and filled after them. This base class needs none.

    Attributes:
      text: The memory's purpose, in the plural, and the options that make it smaller.
      left_out: Reason for which a feature that the checkpoint has was left out; None if none was.
    """

    text = ""
    left_out: LeftOut | None = None

    def bytes_beside(self, model: JaxModule, dtype: DTypeLike) -> int:
        """Returns the bytes on each device, beside a model or stage computing in `dtype`, which may have no weights."""
        del model, dtype
        return 0

    def bytes_on(
        self, meshes: Sequence[jax.sharding.Mesh], models: Sequence[JaxModule], dtype: DTypeLike, budget: int
    ) -> int:
        """Returns the bytes on all devices together.

        `meshes` and `models` are those of the pipeline stages, which compute in `dtype`.

        Raises:
          EngineError: More bytes are needed than `budget`.
        """
        stages = zip(meshes, models, strict=True)
        nbytes = sum(mesh.devices.size * self.bytes_beside(model, dtype) for mesh, model in stages)
        if nbytes and nbytes > budget:
            raise EngineError(
                f"{self.text} take {human_bytes(nbytes)}, more than the {human_bytes(max(0, budget))} of memory that "
                "can be used"
            )
        return nbytes

    def fill(self, executor: Executor, note: Callable[[str], None]) -> list[RequestFeature]:
        """Allocates the memory, which the caches have left free, and returns the features that it serves.

        `note` shows a line to the user.
        """
        del executor, note
        return []


class NoMemory(ExtraMemory):
    """The extra memory of a feature that was left out."""

    def __init__(self, left_out: LeftOut) -> None:
        self.left_out = left_out

    def fill(self, executor: Executor, note: Callable[[str], None]) -> list[RequestFeature]:
        del executor
        if self.left_out is not None and not self.left_out.is_chosen:
            note(self.left_out.reason)
        return []


class JoinedMemory(ExtraMemory):
    """The extra memory of several features."""

    def __init__(self, memories: Sequence[ExtraMemory]) -> None:
        self._memories = memories
        self.text = " and ".join(memory.text for memory in memories if memory.text)
        self.left_out = next((memory.left_out for memory in memories if memory.left_out is not None), None)

    def bytes_beside(self, model: JaxModule, dtype: DTypeLike) -> int:
        return sum(memory.bytes_beside(model, dtype) for memory in self._memories)

    def fill(self, executor: Executor, note: Callable[[str], None]) -> list[RequestFeature]:
        return [feature for memory in self._memories for feature in memory.fill(executor, note)]
