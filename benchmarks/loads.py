"""What `compare.py` runs: the loads of its tables and its sweeps."""

from __future__ import annotations

from dataclasses import dataclass

from jaxis.bench.run import Load

YARDSTICK = "qwen3-0.6b"
TABLE = "table"
LOADS = {"1x128": Load(1, 128, 32), "1x1024": Load(1, 1024, 32), "16x128": Load(16, 128, 24)}


@dataclass(frozen=True)
class Group:
    """Loads of one model, which one process of an engine runs one after the other.

    Attributes:
      name: TABLE, or of a sweep.
      model: Its name.
      loads: In the order in which they run.
    """

    name: str
    model: str
    loads: tuple[Load, ...]


# The cost of a point grows with its tokens: most of a sweep's time goes into the last ones.
_CONTEXTS = tuple(Load(1, length, 12) for length in (1024, 2048, 4096, 8192, 16384))
_BATCHES = tuple(Load(size, 128, 12) for size in (1, 2, 4, 8, 16, 32, 64))
_SIZES = ("qwen3-0.2b", "qwen3-0.6b", "qwen3-1.7b")
SWEEPS = ("context", "batch", "size")


def groups(model: str, loads: list[str], sweeps: list[str]) -> list[Group]:
    """The groups of a comparison.

    Args:
      model: The name of the compared model.
      loads: Of LOADS.
      sweeps: Of SWEEPS; "size" takes the made-up models.
    """
    result = [Group(TABLE, model, tuple(LOADS[name] for name in loads))] if loads else []
    for sweep in sweeps:
        if sweep == "context":
            result.append(Group(sweep, model, _CONTEXTS))
        elif sweep == "batch":
            result.append(Group(sweep, model, _BATCHES))
        else:
            result += [Group(sweep, shape, (LOADS["1x128"],)) for shape in _SIZES]
    return result
