"""The interface to encoders, which compute embeddings of prompts from other inputs than tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from jaxis.engine.execution.programs import Programs
from jaxis.prompts import EmbeddedInput


class InputEncoder(Protocol):
    """Encodes the embedded inputs of prompts. The same input always gives the same bits.

    Attributes:
      max_inputs: Largest number of a prompt's inputs, for each kind that is taken, such as "image".
      request_bytes: Size that a request with a prompt's inputs may need, in bytes.
      embedding_size: E; E * (1 + n) if the first n layers get additions.
      files: Folder or file that says how inputs are made from what users send.
    """

    max_inputs: Mapping[str, int]
    request_bytes: int
    embedding_size: int
    files: Path

    def check(self, item: EmbeddedInput) -> None:
        """Raises a RequestError for an input that it cannot encode."""
        ...

    def begin(self) -> None:
        """Starts over for a new engine loop, which has no sequences yet; it replaces the one before."""
        ...

    def hold(self, inputs: Iterable[EmbeddedInput]) -> None:
        """Holds the inputs of a sequence that waits to run: their embeddings stay at hand until `let_go`."""
        ...

    def let_go(self, inputs: Iterable[EmbeddedInput]) -> None:
        """Releases the inputs of a sequence that held them and has ended."""
        ...

    def is_ready(self, item: EmbeddedInput) -> bool:
        """Returns whether a held input's embeddings are at hand."""
        ...

    def go_on(self, awaited: Sequence[EmbeddedInput], programs: Programs) -> None:
        """Starts the next slice of encoding on the devices, unless they still compute the one before.

        A slice is about as much work as a step of few tokens, so that steps run between two of them.

        Args:
          awaited: Held inputs that are not ready and that sequences wait for, the most urgent first.
          programs: Programs that run the slices.
        """
        ...

    def wait(self) -> None:
        """Waits until the devices have computed the current slice, if any."""
        ...

    def rows(self, item: EmbeddedInput, programs: Programs) -> np.ndarray:
        """Returns a held input's embeddings, float32 [rows, embedding_size].

        If they are not at hand, `programs` compute them, and the call waits for the devices.
        """
        ...
