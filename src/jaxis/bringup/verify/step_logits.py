"""The logits that an engine computes in its steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxis.engine.scheduling.scheduler_output import SchedulerOutput
    from jaxis.llm import LLM


@contextmanager
def recorded_logits(llm: LLM) -> Iterator[defaultdict[tuple[int, ...], dict[int, np.ndarray]]]:
    """Yields a table that the engine's steps fill meanwhile: prompt -> position -> logits, float32 [V]."""
    steps: defaultdict[tuple[int, ...], dict[int, np.ndarray]] = defaultdict(dict)

    def record(output: SchedulerOutput, logits: np.ndarray) -> None:
        row = 0
        for entry in output.scheduled:
            rows = steps[tuple(entry.sequence.prompt_token_ids)]
            for position in range(entry.start, entry.start + entry.num_tokens):
                rows[position] = logits[row]
                row += 1

    runner = llm.engine.runner
    runner.on_step_logits = record
    try:
        yield steps
    finally:
        runner.on_step_logits = None
