"""What is known of a model's programs on a target, and the file that keeps it."""

from __future__ import annotations

import dataclasses
import fcntl
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BFLOAT16 = "bfloat16"


@dataclass(frozen=True)
class Step:
    """The forward program of a step of some number of tokens.

    Attributes:
      in_place: Whether all KV caches are updated in place, and none is copied.
      temporaries: MiB beside arguments and results, on each device.
      exchanges: Opcode of a collective -> how many.
    """

    in_place: bool
    temporaries: float
    exchanges: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """A model with its weights in one width, on one target.

    Attributes:
      model: Its config's name.
      target: The machine.
      width: Of its weights: "bfloat16", "int8" and "int4" as `--quantization` makes them, or "stored".
      steps: Number of tokens, in decimal -> its forward program.
      decode_ratio: Bytes of a decode over those of the weights that it has to read; None for GPUs, whose text does not
        tell memories apart.
      sampler_exchange: MiB that the sampler's program exchanges, on each device; None if it was not compiled.
      error: What the first program that does not compile says; None if all do.
    """

    model: str
    target: str
    width: str = BFLOAT16
    steps: dict[str, Step] = field(default_factory=dict)
    decode_ratio: float | None = None
    sampler_exchange: float | None = None
    error: str | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        """What it is about."""
        return self.target, self.model, self.width


def read_rows(path: Path) -> list[Row]:
    """The rows of a file; none if it is not there."""
    return [_row(values) for values in json.loads(path.read_text())] if path.exists() else []


def merge_rows(path: Path, rows: Iterable[Row]) -> list[Row]:
    """Adds rows to a file, in place of older ones of the same keys; several processes may.

    Returns:
      All that it holds then.
    """
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        text = file.read()
        merged = {row.key: row for row in [*map(_row, json.loads(text) if text else []), *rows]}
        result = [merged[key] for key in sorted(merged)]
        file.seek(0)
        file.truncate()
        file.write(json.dumps([dataclasses.asdict(row) for row in result], indent=1) + "\n")
    return result


def _row(values: dict[str, Any]) -> Row:
    steps = {num_tokens: Step(**step) for num_tokens, step in values["steps"].items()}
    return Row(**values | {"steps": steps})
