"""Logits of one sequence in an idle engine, computed at once or in chunks as prompts are served."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as AbstractSequence

import numpy as np

from jaxis.engine.engine import LLMEngine
from jaxis.engine.execution.runner import Runner
from jaxis.engine.scheduling.data_ranks import DataRanksScheduler
from jaxis.engine.scheduling.scheduler import Scheduler
from jaxis.engine.scheduling.scheduler_output import ScheduledSequence, SchedulerOutput
from jaxis.engine.scheduling.sequence import Sequence, SequenceId
from jaxis.errors import EngineError
from jaxis.sampling_params import SamplingParams


def compute_logits(engine: LLMEngine, token_ids: AbstractSequence[int], *, paged: bool) -> np.ndarray:
    """Computes the logits, float32 [T, V], of every position of one sequence of T tokens.

    With `paged`, it runs through the KV cache in chunks, as prompts are served; otherwise at once without a cache.

    Raises:
      RequestError: No tokens, an unknown one, or too many for the cache.
      EngineError: Requests are running.
    """
    checked = _checked(engine, token_ids)
    if not paged:
        return engine.runner.whole_logits(checked)
    chunk = engine.vllm_config.scheduler_config.max_num_batched_tokens
    try:
        return _paged_logits(engine.runner, engine.scheduler, checked, chunk)
    except BaseException:
        engine.reset()  # the caches were donated to the step, which may have invalidated them
        raise


def iterate_logits(engine: LLMEngine, token_ids: AbstractSequence[int]) -> Iterator[np.ndarray]:
    """Yields the logits of `compute_logits` without a cache, a few rows of [T, V] at a time.

    Raises:
      RequestError: No tokens, an unknown one, or too many for the cache.
      EngineError: Requests are running.
    """
    return engine.runner.iterate_whole_logits(_checked(engine, token_ids))


def _checked(engine: LLMEngine, token_ids: AbstractSequence[int]) -> list[int]:
    """Checks the tokens, and forgets steps in flight, whose requests have ended."""
    if engine.has_unfinished:
        raise EngineError("logits require an idle engine: finish or abort the running requests first")
    engine.steps.discard()
    return engine.factory.checked_prompt(token_ids, spare=0)


def _paged_logits(
    runner: Runner, scheduler: Scheduler | DataRanksScheduler, token_ids: list[int], chunk: int
) -> np.ndarray:
    """Computes logits, float32 [T, V], through the KV cache in chunks; the first data rank lends the blocks."""
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
        output = SchedulerOutput((entry,), 0, (), blocks.connector.take_moves())
        output = scheduler.on_first_rank(output)
        logits.append(runner.paged_logits(output))
        runner.connector.step_read(output)
    blocks.free(sequence)
    return np.concatenate(logits)
