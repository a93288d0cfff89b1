"""The logits of one sequence, computed as prompts are served."""

from __future__ import annotations

import numpy as np

from jaxis.engine.execution.runner import Runner
from jaxis.engine.scheduling.data_ranks import DataRanksScheduler
from jaxis.engine.scheduling.scheduler import Scheduler
from jaxis.engine.scheduling.scheduler_output import ScheduledSequence, SchedulerOutput
from jaxis.engine.scheduling.sequence import Sequence, SequenceId
from jaxis.sampling_params import SamplingParams


def paged_logits(
    runner: Runner, scheduler: Scheduler | DataRanksScheduler, token_ids: list[int], chunk: int
) -> np.ndarray:
    """Logits float32 [T, V] of every position of a sequence, through the KV cache in chunks.

    Args:
      runner: Runs the steps.
      scheduler: Of an idle engine; its first data rank lends the blocks.
      token_ids: T tokens.
      chunk: Most tokens of a step.
    """
    sequence = Sequence(SequenceId(""), token_ids, SamplingParams(), frozenset(), len(token_ids), arrival=0)
    blocks = scheduler.ranks[0].block_manager
    logits = []
    for start in range(0, len(token_ids), chunk):
        sequence.num_computed_tokens = start
        stop = min(start + chunk, len(token_ids))
        blocks.begin_step()
        blocks.allocate(sequence, stop)
        state = blocks.state_step(sequence, start, stop)
        entry = ScheduledSequence(sequence, start, stop - start, samples=False, state=state)
        output = SchedulerOutput((entry,), 0, (), blocks.take_moves())
        logits.append(runner.paged_logits(scheduler.on_first_rank(output)))
        if runner.transfer is not None:
            runner.transfer.commit(output)
    blocks.free(sequence)
    return np.concatenate(logits)
