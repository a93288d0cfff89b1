"""The interface to what a feature adds to a step's programs: fields of the packed vector, and changes of the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import numpy as np

from jaxis.engine.scheduling.scheduler_output import ScheduledSequence, SchedulerOutput
from jaxis.layers.attention_metadata import AttentionMetadata

if TYPE_CHECKING:
    from jaxis.engine.execution.model_arrays import GenerativeModel
    from jaxis.engine.execution.step_shapes import StepShape


class StepPart:
    """One feature's part of a step's shape. This base class adds nothing.

    Programs are compiled for equal parts, so a subclass is a frozen dataclass. Objects that are looked up while a step
    is packed or a program is traced are fields with `compare=False`.

    Attributes:
      arrays: Arrays that the program takes in place of the model's; None for the model's.
      head: Change of the model's head; None for none.
      in_decodes: Part of the next steps, which decode the same sequences; None for none.
    """

    arrays: list[jax.Array] | None = None
    head: HeadPart | None = None
    in_decodes: StepPart | None = None

    def sizes(self, shape: StepShape) -> dict[str, int]:
        """Returns the size of each field that the part adds to the packed vector."""
        del shape
        return {}

    def pack(self, output: SchedulerOutput, shape: StepShape, packed: np.ndarray) -> None:
        """Writes the fields of one rank's step into its vector."""

    def metadata(self, metadata: AttentionMetadata, fields: Mapping[str, jax.Array]) -> AttentionMetadata:
        """Returns, inside the program, the metadata with what the part's fields add."""
        del fields
        return metadata

    def model(self, arrays: list[jax.Array], fields: Mapping[str, jax.Array], shape: StepShape) -> GenerativeModel:
        """Returns, inside the program, the model rebuilt from `arrays`; called only if the part has arrays."""
        raise NotImplementedError

    def arguments(
        self, model: GenerativeModel, input_ids: jax.Array, fields: Mapping[str, jax.Array]
    ) -> dict[str, Any]:
        """Returns, inside the program of the first stage, more arguments for the model's call."""
        del model, input_ids, fields
        return {}


class HeadPart:
    """A change of the model's head for some rows, compiled into the programs of logits as `StepPart` is.

    Attributes:
      arrays: Arrays that the program takes in place of the head's.
    """

    arrays: list[jax.Array]

    def rows(self, entries: Iterable[tuple[ScheduledSequence, int]], num_rows: int) -> np.ndarray:
        """Returns the program's operand, int32 [num_rows], for entries with as many rows each; 0 for padding."""
        raise NotImplementedError

    def model(self, arrays: list[jax.Array], rows: jax.Array) -> GenerativeModel:
        """Returns, inside the program, the model rebuilt from `arrays` for the operand `rows`, i32 [S]."""
        raise NotImplementedError


StepParts: TypeAlias = tuple[StepPart, ...]


def head_of(parts: Sequence[StepPart]) -> HeadPart | None:
    """Returns the change of the head that one of the parts brings, if any."""
    return next((part.head for part in parts if part.head is not None), None)
