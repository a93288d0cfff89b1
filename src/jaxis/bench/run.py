"""One batch of random prompts through the engine, timed step by step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jaxis.errors import RequestError
from jaxis.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxis.engine.engine import LLMEngine
    from jaxis.engine.output_processor import Request


@dataclass(frozen=True)
class Load:
    """Requests that run concurrently.

    Attributes:
      output_len: Tokens that each request generates: the first with its prompt, the others in steps that all share.
    """

    batch_size: int
    input_len: int
    output_len: int

    def max_len(self, max_num_batched_tokens: int) -> int:
        """Returns the most tokens that a request grows to: early requests decode while later ones prefill."""
        prefill_budget = max(1, max_num_batched_tokens - self.batch_size + 1)
        num_prefill_steps = -(-self.batch_size * self.input_len // prefill_budget)
        # The engine is a step ahead of the tokens that it has returned.
        return self.input_len + num_prefill_steps + self.output_len + 1


@dataclass(frozen=True)
class BatchRun:
    """Timings of one batch.

    Attributes:
      first_token_seconds: For each request, the time from when all were queued to its first token.
      step_seconds: Duration of each step in which every request decoded.
      context_len: Average number of tokens that a request attended to in those steps.
      num_step_tokens: Tokens that all requests got in those steps: with drafts, more than one a request and step.
    """

    first_token_seconds: list[float]
    step_seconds: list[float]
    context_len: float
    num_step_tokens: int

    @property
    def prefill_seconds(self) -> float:
        """Time until every request had its first token."""
        return max(self.first_token_seconds)


def random_prompts(rng: np.random.Generator, vocab_size: int, lengths: Sequence[int]) -> list[list[int]]:
    return [rng.integers(0, vocab_size, length).tolist() for length in lengths]


def check_load(engine: LLMEngine, load: Load) -> None:
    """Raises RequestError unless the engine can run all of the load's requests concurrently."""
    limits = engine.vllm_config.scheduler_config
    if load.batch_size > limits.max_num_seqs:
        raise RequestError(
            f"{load.batch_size} requests at once are more than max_num_seqs={limits.max_num_seqs}: raise it"
        )
    length = load.max_len(limits.max_num_batched_tokens)
    if length > engine.max_model_len:
        raise RequestError(
            f"{load.batch_size} requests of {load.input_len} tokens grow to {length}, more than "
            f"max_model_len={engine.max_model_len}: raise it, or shorten input or output"
        )
    block_size = engine.vllm_config.cache_config.block_size
    for span, there_are in engine.runner.num_blocks.items():
        num_needed = span.max_held_blocks(load.batch_size, length, block_size, limits.max_num_batched_tokens)
        if num_needed > there_are:
            raise RequestError(
                f"{load.batch_size} requests of up to {length} tokens need {num_needed} KV cache blocks, and there are "
                f"{there_are}: give a larger kv_cache_memory"
            )


def run_batch(engine: LLMEngine, load: Load, rng: np.random.Generator) -> BatchRun:
    """Runs random prompts concurrently until all have their output, or with drafts the first one has; then drops them.

    The engine is idle. Each call draws new prompts, so that the prefix cache cannot hold them. Raises RequestError if
    the engine cannot run the load, and EngineError if a step failed.
    """
    check_load(engine, load)
    params = SamplingParams(
        temperature=0.0, max_tokens=1 if load.output_len == 1 else None, ignore_eos=True, detokenize=False
    )
    prompts = random_prompts(rng, engine.runner.vocab_size, [load.input_len] * load.batch_size)
    start = previous = time.perf_counter()
    states = [engine.add_request(str(i), prompt, params) for i, prompt in enumerate(prompts)]
    first_tokens: dict[str, float] = {}
    step_seconds: list[float] = []
    num_context_tokens = 0
    num_tokens: list[int] = []  # of each request's output, when all had their first token
    while len(first_tokens) < len(prompts) or max(_new_tokens(states, num_tokens)) < load.output_len - 1:
        all_decode = len(first_tokens) == len(prompts)
        stepped = engine.step()
        now = time.perf_counter()
        for state in stepped:
            if state.error is not None:
                raise state.error
            first_tokens.setdefault(state.request_id, now - start)
        if all_decode:
            step_seconds.append(now - previous)
            num_context_tokens += sum(state.completions[0].sequence.num_tokens - 1 for state in states)
        elif len(first_tokens) == len(prompts):
            num_tokens = [len(state.completions[0].sequence.output_token_ids) for state in states]
        previous = now
    num_step_tokens = sum(_new_tokens(states, num_tokens))
    for state in states:
        engine.abort_request(state.request_id)
    engine.step()  # waits for the step dispatched ahead, so that the next run does not have to
    return BatchRun(
        first_token_seconds=list(first_tokens.values()),
        step_seconds=step_seconds,
        context_len=num_context_tokens / load.batch_size / max(1, len(step_seconds)),
        num_step_tokens=num_step_tokens,
    )


def _new_tokens(states: Sequence[Request], num_tokens: Sequence[int]) -> list[int]:
    now = [len(state.completions[0].sequence.output_token_ids) for state in states]
    return [after - before for before, after in zip(num_tokens, now, strict=True)]
