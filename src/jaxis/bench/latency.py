"""The engine's latency for requests that start together: time to first token, prefill, decode."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxis.bench.cost import DecodeCost, PrefillCost, decode_cost, prefill_cost
from jaxis.bench.run import BatchRun, Load, run_batch
from jaxis.bench.text import draft_counts, draft_figures

if TYPE_CHECKING:
    from jaxis.bench.limits import Limits
    from jaxis.engine.engine import LLMEngine
    from jaxis.engine.speculation import DraftCounts


@dataclass(frozen=True)
class LatencyResult:
    """Timings of one load: medians over the runs and their steps. The decode figures are None if `output_len` is 1.

    Attributes:
      time_to_first_token_seconds: Mean over the requests of a batch.
      prefill_seconds: Time until every request had its first token.
      prefill_share_of_limit: Time for the prefill's operations at the measured FLOPS, over `prefill_seconds`.
      decode_step_seconds: Duration of a step in which every request decodes.
      decode_steps_per_second: Without drafts, also the tokens per second of one request.
      decode_tokens_per_second: Tokens per second of all requests together; with drafts, over all steps.
      context_len: Average number of tokens that a request attended to in those steps.
      decode_weight_bytes, decode_kv_bytes: Bytes that a step reads.
      decode_share_of_limit: Time for those bytes at the measured memory bandwidth, over `decode_step_seconds`.
      drafts: Counts of drafts; None if none are made.
    """

    batch_size: int
    input_len: int
    output_len: int
    time_to_first_token_seconds: float
    prefill_seconds: float
    prefill_tokens_per_second: float
    prefill_share_of_limit: float
    decode_step_seconds: float | None = None
    decode_steps_per_second: float | None = None
    decode_tokens_per_second: float | None = None
    context_len: float | None = None
    decode_weight_bytes: int | None = None
    decode_kv_bytes: float | None = None
    decode_share_of_limit: float | None = None
    drafts: DraftCounts | None = None

    def to_json(self) -> dict[str, Any]:
        figures = dataclasses.asdict(self)
        del figures["drafts"]
        return figures | draft_figures(self.drafts)


def measure_latency(
    engine: LLMEngine, load: Load, limits: Limits, *, repeats: int, rng: np.random.Generator
) -> LatencyResult:
    """Runs a load once to compile its programs, then `repeats` times to measure it; raises as `run_batch` does."""
    run_batch(engine, load, rng)
    before = draft_counts(engine)
    runs = [run_batch(engine, load, rng) for _ in range(repeats)]
    drafts = draft_counts(engine, since=before)
    return summarize(load, runs, decode_cost(engine), prefill_cost(engine.vllm_config), limits, drafts)


def summarize(
    load: Load,
    runs: Sequence[BatchRun],
    decode: DecodeCost,
    prefill: PrefillCost,
    limits: Limits,
    drafts: DraftCounts | None = None,
) -> LatencyResult:
    prefill_seconds = statistics.median(run.prefill_seconds for run in runs)
    num_flops = prefill.flops(load.batch_size, load.input_len)
    result = LatencyResult(
        batch_size=load.batch_size,
        input_len=load.input_len,
        output_len=load.output_len,
        time_to_first_token_seconds=statistics.median(statistics.mean(run.first_token_seconds) for run in runs),
        prefill_seconds=prefill_seconds,
        prefill_tokens_per_second=load.batch_size * load.input_len / prefill_seconds,
        prefill_share_of_limit=num_flops / limits.flops_per_second / prefill_seconds,
    )
    steps = [seconds for run in runs for seconds in run.step_seconds]
    if not steps:
        return result
    step = statistics.median(steps)
    context_len = statistics.mean(run.context_len for run in runs)
    weight_bytes = decode.step_weight_bytes(load.batch_size)
    num_bytes = decode.step_bytes(load.batch_size, context_len)
    return dataclasses.replace(
        result,
        decode_step_seconds=step,
        decode_steps_per_second=1 / step,
        decode_tokens_per_second=(
            load.batch_size / step if drafts is None else sum(run.num_step_tokens for run in runs) / sum(steps)
        ),
        context_len=context_len,
        decode_weight_bytes=weight_bytes,
        decode_kv_bytes=num_bytes - weight_bytes,
        decode_share_of_limit=num_bytes / limits.memory_bytes_per_second / step,
        drafts=drafts,
    )
