"""Runs one engine on one load, in a process of its own; prints what it measured as one JSON line.

Not for use by hand: `compare.py` starts it.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from jaxis.bench.process import peak_memory_bytes
from jaxis.bench.run import Load

CLASSES = {
    "jaxis": "peers.jaxis_peer:JaxisPeer",
    "transformers": "peers.transformers_peer:TransformersPeer",
    "llama.cpp": "peers.llama_cpp_peer:LlamaCppPeer",
}
SEED = 0
START_TOKENS = 128


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """What a task measured, in seconds and bytes.

    Args:
      task: "engine", "model", "arguments" and "load", and "start_only": whether to end with the first token.
    """
    module, _, name = CLASSES[task["engine"]].partition(":")
    load = Load(**task["load"])
    rng = np.random.default_rng(SEED)
    peer = getattr(importlib.import_module(module), name)(Path(task["model"]), task["arguments"], load)
    peer.run(Load(1, min(START_TOKENS, load.input_len), 1), rng)
    start = {"first_token_at": time.time(), "start_peak_memory_bytes": peak_memory_bytes()}
    if task["start_only"]:
        return start
    peer.warm_up(load, rng)
    run = peer.run(load, rng)
    return start | {
        "prefill_seconds": run.prefill_seconds,
        "step_seconds": float(np.median(run.step_seconds)),
        "context_len": run.context_len,
        **dataclasses.asdict(peer.decode_cost),
        "peak_memory_bytes": peak_memory_bytes(),
    }


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
