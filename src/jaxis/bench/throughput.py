"""Measures requests and tokens per second when all requests are queued at once."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxis.bench.run import random_prompts
from jaxis.bench.text import draft_counts, draft_figures
from jaxis.errors import RequestError
from jaxis.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxis.engine.engine import LLMEngine
    from jaxis.engine.speculation import DraftCounts


@dataclass(frozen=True)
class RequestShape:
    """Lengths of one request, in tokens."""

    input_len: int
    output_len: int


@dataclass(frozen=True)
class ThroughputResult:
    """Timings of a list of requests.

    Attributes:
      elapsed_seconds: Time from when the first request was queued to the last token of all.
      first_token_seconds_median, first_token_seconds_p99: Times from when all were queued, so waiting is included.
      token_seconds_median, token_seconds_p99: Mean time of a request per token after its first; None if no request has
        two tokens.
      num_preemptions: Times that a request had to give up its KV cache blocks.
      drafts: Counts of drafts; None if none are made.
    """

    num_requests: int
    num_input_tokens: int
    num_output_tokens: int
    elapsed_seconds: float
    requests_per_second: float
    input_tokens_per_second: float
    output_tokens_per_second: float
    first_token_seconds_median: float
    first_token_seconds_p99: float
    token_seconds_median: float | None
    token_seconds_p99: float | None
    num_preemptions: int
    drafts: DraftCounts | None = None

    def to_json(self) -> dict[str, Any]:
        figures = dataclasses.asdict(self)
        del figures["drafts"]
        return figures | draft_figures(self.drafts)


def request_mix(
    num_requests: int, input_lens: Sequence[int], output_lens: Sequence[int], rng: np.random.Generator
) -> list[RequestShape]:
    """Draws the lengths of requests uniformly and independently from the given ones."""
    inputs = rng.choice(input_lens, num_requests).tolist()
    outputs = rng.choice(output_lens, num_requests).tolist()
    return [RequestShape(*lengths) for lengths in zip(inputs, outputs, strict=True)]


def measure_throughput(
    engine: LLMEngine, requests: Sequence[RequestShape], rng: np.random.Generator
) -> ThroughputResult:
    """Runs the requests once to compile their programs, then again, with other prompts, to measure them.

    Raises RequestError if the engine cannot hold one of the requests, and EngineError if a step failed.
    """
    _run(engine, requests, rng)
    return _run(engine, requests, rng)


def _run(engine: LLMEngine, requests: Sequence[RequestShape], rng: np.random.Generator) -> ThroughputResult:
    for request in requests:
        if request.input_len + request.output_len > engine.max_model_len:
            raise RequestError(
                f"a request of {request.input_len} + {request.output_len} tokens is more than "
                f"max_model_len={engine.max_model_len}: raise it, or shorten input or output"
            )
    prompts = random_prompts(rng, engine.runner.vocab_size, [request.input_len for request in requests])
    drafts_before = draft_counts(engine)
    start = time.perf_counter()
    states = []
    for i, (request, prompt) in enumerate(zip(requests, prompts, strict=True)):
        params = SamplingParams(temperature=0.0, max_tokens=request.output_len, ignore_eos=True, detokenize=False)
        states.append(engine.add_request(str(i), prompt, params))
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    while engine.has_unfinished:
        stepped = engine.step()
        now = time.perf_counter() - start
        for state in stepped:
            if state.error is not None:
                raise state.error
            first.setdefault(state.request_id, now)
            last[state.request_id] = now
    elapsed = max(last.values())
    token_seconds = [
        (last[str(i)] - first[str(i)]) / (request.output_len - 1)
        for i, request in enumerate(requests)
        if request.output_len > 1
    ]
    num_input_tokens = sum(request.input_len for request in requests)
    num_output_tokens = sum(len(state.completions[0].sequence.output_token_ids) for state in states)
    return ThroughputResult(
        num_requests=len(requests),
        num_input_tokens=num_input_tokens,
        num_output_tokens=num_output_tokens,
        elapsed_seconds=elapsed,
        requests_per_second=len(requests) / elapsed,
        input_tokens_per_second=num_input_tokens / elapsed,
        output_tokens_per_second=num_output_tokens / elapsed,
        first_token_seconds_median=float(np.median(list(first.values()))),
        first_token_seconds_p99=float(np.percentile(list(first.values()), 99)),
        token_seconds_median=float(np.median(token_seconds)) if token_seconds else None,
        token_seconds_p99=float(np.percentile(token_seconds, 99)) if token_seconds else None,
        num_preemptions=sum(state.completions[0].sequence.num_preemptions for state in states),
        drafts=draft_counts(engine, since=drafts_before),
    )
