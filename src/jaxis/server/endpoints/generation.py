"""Runs a request on the engine, for one prompt or several."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal

from jaxis.engine.grammar.delayed_grammar import Grammar
from jaxis.errors import ContextLengthError, DeadlineExceededError, OverloadedError
from jaxis.outputs import RequestOutput
from jaxis.prompts import TokenizedPrompt
from jaxis.sampling_params import SamplingParams
from jaxis.server.endpoints.context import ServerContext

# A prompt's index in its request, and its new output.
PromptOutput = tuple[int, RequestOutput]


@dataclass(frozen=True)
class GenerationJob:
    """One generation request of an endpoint.

    Attributes:
      request_id: Unique.
      num_prompts: How many prompts `preprocess` will return.
      preprocess: Returns the prompts; runs once there is a place for the request, in a thread unless it is quick.
      params: For every prompt.
      compile_grammar: Compiles the grammar of a prompt's answer, which may take seconds; None if answers are free.
      priority: The lower value is served first.
      stream: Whether outputs are wanted as they come, and not all at the end.
      is_quick: `preprocess` takes less than handing it to a thread does.
      operation: Its name in traces.
    """

    request_id: str
    num_prompts: int
    preprocess: Callable[[], Sequence[TokenizedPrompt]]
    params: SamplingParams
    compile_grammar: Callable[[TokenizedPrompt], Grammar] | None = None
    priority: int = 0
    stream: bool = False
    is_quick: bool = False
    operation: Literal["chat", "text_completion"] = "chat"


async def generate(context: ServerContext, job: GenerationJob) -> AsyncGenerator[PromptOutput, None]:
    """Runs a job; closing the generator before its end aborts all of it.

    Raises:
      ContextLengthError: A prompt is too long.
      RateLimitError: The request's API key has used up its minute.
      JaxisError: See `AsyncLLMEngine.reserve` and `AsyncLLMEngine.generate`; what was generated is lost.
    """
    context.meter.admit()
    arrival = time.monotonic()
    timeout = context.config.request_timeout_seconds
    try:
        with context.engine.reserve(job.num_prompts * job.params.n):
            async with asyncio.timeout(timeout):
                prompts = await context.preprocess(job.preprocess, is_quick=job.is_quick)
                grammars: list[Grammar | None] = [None] * len(prompts)
                if (compile_grammar := job.compile_grammar) is not None:
                    grammars = await context.compile(lambda: [compile_grammar(prompt) for prompt in prompts])
            time_left = None if timeout is None else max(0.0, timeout - (time.monotonic() - arrival))
            streams = [
                _generate_one(context, job, prompt, grammar, f"{job.request_id}-{index}", arrival, time_left)
                for index, (prompt, grammar) in enumerate(zip(prompts, grammars, strict=True))
            ]
            async with aclosing(_merge(streams)) as outputs:
                async for output in outputs:
                    yield output
    except OverloadedError:
        context.metrics.rejected("overloaded")
        raise
    except (TimeoutError, DeadlineExceededError):
        raise DeadlineExceededError(
            f"the request was aborted: its answer took longer than the {timeout:g} s that this server allows"
        ) from None


async def _generate_one(
    context: ServerContext,
    job: GenerationJob,
    prompt: TokenizedPrompt,
    grammar: Grammar | None,
    request_id: str,
    arrival: float,
    timeout: float | None,
) -> AsyncGenerator[RequestOutput, None]:
    engine, meter = context.engine, context.meter.start()
    with (
        context.metrics.request(job.params, arrival) as request,
        context.trace(job.operation, request_id, request),
    ):
        if len(prompt.token_ids) >= engine.info.max_model_len:
            raise ContextLengthError(len(prompt.token_ids), engine.info.max_model_len)
        outputs = engine.generate(
            prompt,
            job.params,
            request_id,
            priority=context.meter.priority(job.priority),
            timeout_seconds=timeout,
            final_only=not job.stream,
            grammar=grammar,
        )
        async with aclosing(outputs):
            async for output in outputs:
                request.add(output)
                if meter is not None:
                    meter.add(output)
                yield output


async def _merge(streams: Sequence[AsyncGenerator[RequestOutput, None]]) -> AsyncGenerator[PromptOutput, None]:
    """Yields the streams' outputs as they arrive."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as outputs:
            async for output in outputs:
                yield 0, output
        return
    # Full once each stream has an item in it: a slow reader's outputs wait, and merge, in the engine's streams.
    merged: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue(len(streams))

    async def pump(index: int, stream: AsyncGenerator[RequestOutput, None]) -> None:
        try:
            async with aclosing(stream):
                async for output in stream:
                    await merged.put((index, output))
            await merged.put((index, None))
        except Exception as error:
            await merged.put((index, error))

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    num_left = len(tasks)
    try:
        while num_left:
            index, output = await merged.get()
            if isinstance(output, Exception):
                raise output
            if output is None:
                num_left -= 1
            else:
                yield index, output
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
