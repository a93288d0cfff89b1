"""Converts a checkpoint to Orbax and back, and compares byte by byte."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from jaxis.bringup.convert.convert import convert_checkpoint
from jaxis.loading.checkpoint import Checkpoint

LAYOUTS = {"unscanned": False, "scanned": True}


@dataclass(frozen=True)
class RoundTrip:
    """The result of one conversion to Orbax, into `num_arrays`, and back; `different` names tensors that changed."""

    layout: str
    num_tensors: int
    num_arrays: int
    total_bytes: int
    different: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.different


def round_trips(folder: Path) -> list[RoundTrip]:
    """Converts a Hugging Face checkpoint to Orbax in both layouts and back. Raises as `convert_checkpoint`."""
    results = []
    for layout, scanned in LAYOUTS.items():
        with tempfile.TemporaryDirectory(prefix="jaxis_round_trip_") as scratch:
            orbax, back = Path(scratch, "orbax"), Path(scratch, "back")
            there = convert_checkpoint(folder, orbax, "orbax", scanned=scanned)
            convert_checkpoint(orbax, back, "hf")
            different = _different(folder, back)
        results.append(RoundTrip(layout, there.num_tensors, there.num_arrays, there.total_bytes, different))
    return results


def _different(a: Path, b: Path) -> tuple[str, ...]:
    with Checkpoint(a) as before, Checkpoint(b) as after:
        names = sorted({*before.names(), *after.names()})
        return tuple(name for name in names if not _same(before, after, name))


def _same(before: Checkpoint, after: Checkpoint, name: str) -> bool:
    if name not in before or name not in after:
        return False
    x, y = before.tensor(name), after.tensor(name)
    return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
