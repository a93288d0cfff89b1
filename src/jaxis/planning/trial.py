"""Times an engine on this machine, in a process of its own: its start, its memory, and steps of a few loads.

python -m jaxis.planning.trial '{"model": "FOLDER", "quantization": "int8", "loads": [[1, 128, 16]]}'
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

_RUNS = 2
# Guesses at next tokens change how many rows a step has.
_NO_DRAFTS = {"speculative_config": {"num_speculative_tokens": 0}}


@dataclass(frozen=True)
class Timing:
    """Medians of a load: time until every request had its first token, and of a step in which all decode."""

    prefill_seconds: float
    step_seconds: float


@dataclass(frozen=True)
class Trial:
    """Figures of one engine.

    Attributes:
      start_seconds: From the start of the process to the first token, with programs that are compiled already.
      peak_bytes: Resident memory at the first token.
    """

    start_seconds: float
    peak_bytes: int
    timings: tuple[Timing, ...]


def run_trial(model: Path, quantization: str | None, loads: Sequence[Load]) -> Trial:
    """Times an engine twice, since the first start compiles. Raises EngineError if a process fails."""
    given = [dataclasses.astuple(load) for load in loads]
    _child(model, quantization, given[:1])
    found = _child(model, quantization, given)
    return Trial(found["start_seconds"], found["peak_bytes"], tuple(Timing(*each) for each in found["timings"]))


def _child(model: Path, quantization: str | None, loads: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    given = json.dumps({"model": str(model), "quantization": quantization, "loads": loads})
    command = [sys.executable, "-m", "jaxis.planning.trial", given]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    if child.returncode != 0:
        reason = child.stderr.strip().rpartition("\n")[2] or f"exit code {child.returncode}"
        raise EngineError(f"this machine could not be measured: {reason}")
    return json.loads(child.stdout)


def _measure(model: str, quantization: str | None, loads: Sequence[Load]) -> dict[str, object]:
    import numpy as np

    from jaxis.bench.run import run_batch
    from jaxis.bench.session import longest_sequence, open_session
    from jaxis.host.progress import ProgressDisplay

    rng = np.random.default_rng(0)
    arguments = {"quantization": quantization, **_NO_DRAFTS}
    timings = []
    with open_session(
        model,
        arguments,
        max_num_seqs=max(load.batch_size for load in loads),
        max_model_len=longest_sequence(loads, arguments),
        input_len=loads[0].input_len,
        rng=rng,
        progress=ProgressDisplay(False),
    ) as session:
        for load in loads:
            run_batch(session.engine, load, rng)
            runs = [run_batch(session.engine, load, rng) for _ in range(_RUNS)]
            steps = [seconds for run in runs for seconds in run.step_seconds]
            timings.append((statistics.median(run.prefill_seconds for run in runs), statistics.median(steps or [0.0])))
    return {
        "start_seconds": session.seconds_to_first_token,
        "peak_bytes": session.start_peak_memory_bytes,
        "timings": timings,
    }


if __name__ == "__main__":
    _given = json.loads(sys.argv[1])
    _loads = [Load(*load) for load in _given["loads"]]
    print(json.dumps(_measure(_given["model"], _given["quantization"], _loads)))
