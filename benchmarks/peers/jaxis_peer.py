"""jaxis itself, through its engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxis.bench.cost import DecodeCost, decode_cost
from jaxis.bench.run import BatchRun, Load, run_batch
from jaxis.bench.session import build_sized_engine, longest_sequence
from jaxis.host.progress import ProgressDisplay

WARM_UP_OUTPUT_LEN = 4
# What random weights write repeats itself, and lookup in it drafts more than in any text: the peers draft nothing.
NO_DRAFTS = {"speculative_config": {"num_speculative_tokens": 0}}


class JaxisPeer:
    """See the package. `arguments` are those of `jaxis.LLM`; nothing is drafted unless they say so."""

    def __init__(self, model: Path, arguments: dict[str, Any], loads: Sequence[Load]) -> None:
        arguments = NO_DRAFTS | arguments
        self._engine = build_sized_engine(
            str(model),
            arguments,
            max_num_seqs=max(load.batch_size for load in loads),
            max_model_len=longest_sequence(loads, arguments),
            progress=ProgressDisplay(enabled=False),
        )

    @property
    def decode_cost(self) -> DecodeCost:
        return decode_cost(self._engine)

    def warm_up(self, load: Load, rng: np.random.Generator) -> None:
        # Compiles all the step shapes of the load: of its chunks of prefill and of its decode steps. All chunks of one
        # long prompt but the last are alike, so that two of them will do.
        budget = self._engine.vllm_config.scheduler_config.max_num_batched_tokens
        input_len = load.input_len
        if load.batch_size == 1:
            input_len = min(input_len, 2 * budget + input_len % budget)
        run_batch(
            self._engine,
            dataclasses.replace(load, input_len=input_len, output_len=min(load.output_len, WARM_UP_OUTPUT_LEN)),
            rng,
        )

    def run(self, load: Load, rng: np.random.Generator) -> BatchRun:
        return run_batch(self._engine, load, rng)
