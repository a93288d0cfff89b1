"""metrics.jsonl: one line for each step, and for each time that the held-out loss was measured."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from jaxis.errors import CheckpointError

METRICS_FILE = "metrics.jsonl"


class MetricsFile:
    """The file of a run that begins, or goes on, after a step.

    Args:
      output: The folder of the run.
      after_step: Lines of later steps are dropped: those steps are done again.

    Raises:
      CheckpointError: It cannot be written.
    """

    def __init__(self, output: Path, after_step: int) -> None:
        self._path = output / METRICS_FILE
        try:
            output.mkdir(parents=True, exist_ok=True)
            kept = b""
            if after_step and self._path.exists():
                lines = self._path.read_bytes().splitlines(keepends=True)
                kept = b"".join(line for line in lines if _step_of(line) <= after_step)
            partial = self._path.with_name(f".{METRICS_FILE}.partial")
            partial.write_bytes(kept)
            os.replace(partial, self._path)
            self._file: TextIO = self._path.open("a", encoding="utf-8")
        except OSError as error:
            raise self._fault(error) from None

    def write(self, values: Mapping[str, Any]) -> None:
        """Appends a line.

        Raises:
          CheckpointError: It cannot be written.
        """
        try:
            self._file.write(json.dumps(values) + "\n")
            self._file.flush()
        except OSError as error:
            raise self._fault(error) from None

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _fault(self, error: OSError) -> CheckpointError:
        return CheckpointError(f"{self._path} cannot be written: {error.strerror}")


def _step_of(line: bytes) -> float:
    """The step of a line; of half a line, the last that a killed run wrote, a step after all others."""
    try:
        return json.loads(line)["step"] if line.endswith(b"\n") else float("inf")
    except (ValueError, KeyError, TypeError):
        return float("inf")
