"""JSONL files whose lines name a step: metrics.jsonl, and answers.jsonl with the answers to held-out prompts."""

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
    """A file of a run that begins, or resumes, after a step: lines of later steps, which run again, are dropped.

    Raises CheckpointError if the file cannot be written.
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
        """Appends a line. Raises CheckpointError if the file cannot be written."""
        try:
            self._file.write(json.dumps(values) + "\n")
            self._file.flush()
        except OSError as error:
            raise self._fault(error) from None

    def close(self) -> None:
        self._file.close()

    def _fault(self, error: OSError) -> CheckpointError:
        return CheckpointError(f"{self._path} cannot be written: {error.strerror}")


def _step_of(line: bytes) -> float:
    """Returns the step of a line. An incomplete line, left by a killed run, gets infinity."""
    try:
        return json.loads(line)["step"] if line.endswith(b"\n") else float("inf")
    except (ValueError, KeyError, TypeError):
        return float("inf")
