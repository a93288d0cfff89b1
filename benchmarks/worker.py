"""Runs one engine on some loads, in a process of its own; prints what it measured as one JSON line.

Not for use by hand: `compare.py` starts it.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from jaxis.bench.run import Load

CLASSES = {
    "jaxis": "peers.jaxis_peer:JaxisPeer",
    "transformers": "peers.transformers_peer:TransformersPeer",
    "llama.cpp": "peers.llama_cpp_peer:LlamaCppPeer",
    "ik_llama.cpp": "peers.ik_llama_cpp_peer:IkLlamaCppPeer",
}
SEED = 0
START_TOKENS = 128


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """What a task measured, in seconds and bytes.

    Args:
      task: "engine", "model", "arguments", "loads", and "start_only": whether to end with the first token.

    Returns:
      Of the process as a whole; "loads" has what was measured of each load.
    """
    module, _, name = CLASSES[task["engine"]].partition(":")
    loads = [Load(**load) for load in task["loads"]]
    rng = np.random.default_rng(SEED)
    peer = getattr(importlib.import_module(module), name)(Path(task["model"]), task["arguments"], loads)
    peer.run(Load(1, min(START_TOKENS, *(load.input_len for load in loads)), 1), rng)
    start = {"first_token_at": time.time(), "start_peak_memory_bytes": _peak_memory_bytes()}
    if task["start_only"]:
        return start
    measured = []
    for load in loads:
        peer.warm_up(load, rng)
        run = peer.run(load, rng)
        measured.append(
            {
                **dataclasses.asdict(load),
                "prefill_seconds": run.prefill_seconds,
                "step_seconds": float(np.median(run.step_seconds)),
                "context_len": run.context_len,
            }
        )
    return start | {
        "loads": measured,
        **dataclasses.asdict(peer.decode_cost),
        "peak_memory_bytes": _peak_memory_bytes(),
    }


def _peak_memory_bytes() -> int:
    """Of this process, or of the largest that it has run."""
    # Not by a function of jaxis: older trees, which this file measures as baselines, do not have it.
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB elsewhere


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
