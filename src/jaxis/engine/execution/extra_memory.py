"""The seam to what a feature has on the devices beside the model's weights and caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
from jax.typing import DTypeLike

from jaxis.engine.execution.adapters import Adapters
from jaxis.engine.execution.executor import Executor
from jaxis.engine.execution.input_encoder import InputEncoder
from jaxis.errors import EngineError
from jaxis.host.byte_size import human_bytes
from jaxis.layers.module import JaxModule


@dataclass(frozen=True)
class ExtraContents:
    """What rooms hold once they are filled.

    Attributes:
      adapters: The adapters that requests may have; None: none.
      inputs: What computes embeddings of prompts from something else than tokens; None: nothing.
    """

    adapters: Adapters | None = None
    inputs: InputEncoder | None = None


class ExtraMemory:
    """Room on the devices that is planned with the weights and filled after them; this one is of no feature: none.

    Attributes:
      text: What it is for, in the plural, and the options that make it smaller.
    """

    text = ""

    def bytes_beside(self, model: JaxModule, dtype: DTypeLike) -> int:
        """Bytes on each device, beside a model that computes in dtype, or a stage of one; it may have no weights."""
        del model, dtype
        return 0

    def bytes_on(
        self, meshes: Sequence[jax.sharding.Mesh], models: Sequence[JaxModule], dtype: DTypeLike, budget: int
    ) -> int:
        """Bytes on all devices together.

        Args:
          meshes: The devices of each pipeline stage.
          models: Each stage's.
          dtype: See `bytes_beside`.
          budget: Bytes that can be used.

        Raises:
          EngineError: They are more.
        """
        stages = zip(meshes, models, strict=True)
        nbytes = sum(mesh.devices.size * self.bytes_beside(model, dtype) for mesh, model in stages)
        if nbytes and nbytes > budget:
            raise EngineError(
                f"{self.text} take {human_bytes(nbytes)}, more than the {human_bytes(max(0, budget))} of memory that "
                "can be used"
            )
        return nbytes

    def fill(self, executor: Executor, note: Callable[[str], None]) -> ExtraContents:
        """Allocates it, beside caches that left the room.

        Args:
          executor: Runs the model.
          note: Shows a line.

        Returns:
          What it holds now.
        """
        del executor, note
        return ExtraContents()


class JoinedMemory(ExtraMemory):
    """The rooms of several features.

    Args:
      rooms: At least one.
    """

    def __init__(self, rooms: Sequence[ExtraMemory]) -> None:
        self._rooms = rooms
        self.text = " and ".join(room.text for room in rooms)

    def bytes_beside(self, model: JaxModule, dtype: DTypeLike) -> int:
        """See `ExtraMemory`."""
        return sum(room.bytes_beside(model, dtype) for room in self._rooms)

    def fill(self, executor: Executor, note: Callable[[str], None]) -> ExtraContents:
        """See `ExtraMemory`."""
        contents = [room.fill(executor, note) for room in self._rooms]
        return ExtraContents(
            next((each.adapters for each in contents if each.adapters is not None), None),
            next((each.inputs for each in contents if each.inputs is not None), None),
        )
