"""Times an engine on this machine, in a process of its own: its start, its memory, and steps of a few loads.

python -m jaxis.planning.trial '{"model": "M", "quantization": "int8", "loads": [[1, 128, 16]], "start_only": false}'
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxis.bench.run import Load
from jaxis.errors import EngineError

_RUNS = 3
# Guesses at next tokens change how many rows a step has.
_NO_DRAFTS = {"speculative_config": {"num_speculative_tokens": 0}}


@dataclass(frozen=True)
class Timing:
    """Times of a load's fastest run: until every request had its first token, and the median step in which all decode.

    What else a machine does only adds to a time, as compiling does to the first run's.
    """

    prefill_seconds: float
    step_seconds: float


@dataclass(frozen=True)
class Trial:
    """Figures of one engine.

    Attributes:
      start_seconds: From the start of the process to the first token, with programs that are compiled already.
      peak_bytes: Resident memory at the first token.
      step_barriers: Kernels of a step that threads share.
    """

    start_seconds: float
    peak_bytes: int
    step_barriers: float
    timings: tuple[Timing, ...]


def run_trial(model: Path, quantization: str | None, loads: Sequence[Load]) -> Trial:
    """Times the faster of two starts after one that compiled programs, for caches of the same size, and then the loads.

    Raises EngineError if a process fails.
    """
    _child(model, quantization, loads, start_only=True)
    start = _child(model, quantization, loads, start_only=True)["start_seconds"]
    found = _child(model, quantization, loads)
    timings = tuple(Timing(*each) for each in found["timings"])
    return Trial(min(start, found["start_seconds"]), found["peak_bytes"], found["step_barriers"], timings)


def _child(model: Path, quantization: str | None, loads: Sequence[Load], *, start_only: bool = False) -> dict[str, Any]:
    numbers = [dataclasses.astuple(load) for load in loads]
    given = json.dumps({"model": str(model), "quantization": quantization, "loads": numbers, "start_only": start_only})
    command = [sys.executable, "-m", "jaxis.planning.trial", given]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    if child.returncode != 0:
        reason = child.stderr.strip().rpartition("\n")[2] or f"exit code {child.returncode}"
        raise EngineError(f"this machine could not be measured: {reason}")
    return json.loads(child.stdout)


def _measure(model: str, quantization: str | None, loads: Sequence[Load], *, start_only: bool) -> dict[str, object]:
    import numpy as np

    from jaxis.bench.run import run_batch
    from jaxis.bench.session import longest_sequence, open_session
    from jaxis.host.progress import ProgressDisplay
    from jaxis.kernels import native

    library = native.library()

    def num_barriers() -> int:
        return 0 if library is None else library.jaxis_num_barriers()

    rng = np.random.default_rng(0)
    arguments = {"quantization": quantization, **_NO_DRAFTS}
    timings, step_barriers = [], 0.0
    with open_session(
        model,
        arguments,
        max_num_seqs=max(load.batch_size for load in loads),
        max_model_len=longest_sequence(loads, arguments),
        input_len=loads[0].input_len,
        rng=rng,
        progress=ProgressDisplay(False),
    ) as session:
        for load in () if start_only else loads:
            before = num_barriers()
            runs = [run_batch(session.engine, load, rng) for _ in range(_RUNS)]
            steps = [statistics.median(run.step_seconds or [0.0]) for run in runs]
            timings.append((min(run.prefill_seconds for run in runs), min(steps)))
            if load is loads[0]:  # of one request, whose prompt is one step
                step_barriers = (num_barriers() - before) / (_RUNS * load.output_len)
    return {
        "start_seconds": session.seconds_to_first_token,
        "peak_bytes": session.start_peak_memory_bytes,
        "step_barriers": step_barriers,
        "timings": timings,
    }


if __name__ == "__main__":
    _given = json.loads(sys.argv[1])
    _loads = [Load(*load) for load in _given["loads"]]
    print(json.dumps(_measure(_given["model"], _given["quantization"], _loads, start_only=_given["start_only"])))
