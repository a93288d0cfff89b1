"""Files with a JSON object a line, each of which names its step: metrics.jsonl, and the answers to held-out prompts."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from jaxis.errors import CheckpointError

METRICS_FILE = "metrics.jsonl"
ANSWERS_FILE = "answers.jsonl"


class MetricsFile:
    """The file of a run that begins, or goes on, after a step.

    Args:
      path: The file.
      after_step: Lines of later steps are dropped: those steps are done again.

    Raises:
      CheckpointError: It cannot be written.
    """

    def __init__(self, path: Path, after_step: int) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            kept = b""
            if after_step and self._path.exists():
                lines = self._path.read_bytes().splitlines(keepends=True)
                kept = b"".join(line for line in lines if _step_of(line) <= after_step)
            partial = self._path.with_name(f".{path.name}.partial")
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
