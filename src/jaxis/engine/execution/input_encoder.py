"""The seam to what computes embeddings of prompts from something else than tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from jaxis.engine.execution.programs import Programs
from jaxis.prompts import EmbeddedInput


class InputEncoder(Protocol):
    """Encodes the inputs of prompts; the same input always to the same bits.

    Attributes:
      max_inputs: For each kind that is taken, such as "image", the most of a prompt.
      request_bytes: How large a request with a prompt's inputs may have to be.
      embedding_size: E; E * (1 + n) if the first n layers get additions.
      files: The folder or file that says how inputs are made from what users send.
    """

    max_inputs: Mapping[str, int]
    request_bytes: int
    embedding_size: int
    files: Path

    def check(self, item: EmbeddedInput) -> None:
        """Raises a RequestError for an input that it cannot encode."""
        ...

    def begin(self) -> None:
        """A new engine loop, which has no sequences yet, takes the place of the one before."""
        ...

    def hold(self, inputs: Iterable[EmbeddedInput]) -> None:
        """A sequence with these inputs waits to run; what is computed for it stays at hand until it lets go."""
        ...

    def let_go(self, inputs: Iterable[EmbeddedInput]) -> None:
        """A sequence that held these inputs has ended."""
        ...

    def is_ready(self, item: EmbeddedInput) -> bool:
        """Whether a held input's embeddings are at hand."""
        ...

    def go_on(self, awaited: Sequence[EmbeddedInput], programs: Programs) -> None:
        """Devices begin with the next slice of what computes embeddings, unless they are at the one before.

        A slice is about as much work as a step of few tokens, so that steps run between two of them.

        Args:
          awaited: Held inputs that are not ready and that sequences wait for, the first one first.
          programs: Run the slices.
        """
        ...

    def wait(self) -> None:
        """Waits until devices are done with the slice that they compute, if they do."""
        ...

    def rows(self, item: EmbeddedInput, programs: Programs) -> np.ndarray:
        """The input's embeddings, float32 [rows, embedding_size].

        They are computed if they are not at hand, which waits for the devices.

        Args:
          item: The input, which a sequence holds.
          programs: Run what computes them.
        """
        ...
