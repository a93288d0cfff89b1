"""jaxis itself, through its engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from jaxis.bench.cost import DecodeCost, decode_cost
from jaxis.bench.run import BatchRun, Load, run_batch
from jaxis.bench.session import build_sized_engine, longest_sequence
from jaxis.host.progress import ProgressDisplay


class JaxisPeer:
    """See the package. `arguments` are those of `jaxis.LLM`."""

    def __init__(self, model: Path, arguments: dict[str, Any], load: Load) -> None:
        self._engine = build_sized_engine(
            str(model),
            arguments,
            max_num_seqs=load.batch_size,
            max_model_len=longest_sequence([load], arguments),
            progress=ProgressDisplay(enabled=False),
        )

    @property
    def decode_cost(self) -> DecodeCost:
        return decode_cost(self._engine)

    def warm_up(self, load: Load, rng: np.random.Generator) -> None:
        # Only the load itself has all the step shapes that are to be compiled.
        run_batch(self._engine, load, rng)

    def run(self, load: Load, rng: np.random.Generator) -> BatchRun:
        return run_batch(self._engine, load, rng)
