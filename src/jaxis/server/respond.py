"""Runs a job on the engine, and answers its request in the form of its protocol."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Protocol

from fastapi import Request, Response
from pydantic import BaseModel

from jaxis.engine.grammar.matcher import Grammar
from jaxis.errors import ContextLengthError, DeadlineExceededError, OverloadedError, RequestError
from jaxis.outputs import RequestOutput, merge_outputs
from jaxis.prompts import TokenizedPrompt
from jaxis.server.context import ServerContext
from jaxis.server.generation.job import GenerationJob
from jaxis.server.http.errors import StreamForm
from jaxis.server.http.sse import respond_stream, respond_whole

# Index of a prompt in its job, and its new output.
PromptOutput = tuple[int, RequestOutput]


class AnswerWriter(StreamForm, Protocol):
    """Writer of one answer in the form of its protocol, streamed or whole."""

    def add(self, prompt: int, output: RequestOutput) -> str:
        """Returns the text that an output of the prompt with this index adds to the stream; "" if none."""
        ...

    def end(self) -> str:
        """Returns the end of the stream."""
        ...

    def whole(self, outputs: Sequence[RequestOutput]) -> BaseModel:
        """Returns the whole answer, given the whole output of each prompt."""
        ...


async def respond(
    request: Request,
    context: ServerContext,
    job: GenerationJob,
    writer: AnswerWriter,
    headers: Mapping[str, str],
) -> Response:
    """Runs a job and returns the answer, which `writer` writes, with these additional headers."""
    if job.stream:
        response = await respond_stream(request, _stream(context, job, writer), writer, context.config, headers)
    else:
        response = await respond_whole(request, _whole(context, job, writer), headers)
    if job.answer.grammar is not None:
        response.headers.update(context.ignored_fields.more(headers, job.answer.grammar.ignored))
    return response


async def _stream(context: ServerContext, job: GenerationJob, writer: AnswerWriter) -> AsyncGenerator[str, None]:
    async with aclosing(generate(context, job)) as prompt_outputs:
        async for prompt, output in prompt_outputs:
            if text := writer.add(prompt, output):
                yield text
    yield writer.end()


async def _whole(context: ServerContext, job: GenerationJob, writer: AnswerWriter) -> BaseModel:
    outputs: list[list[RequestOutput]] = [[] for _ in range(job.prompts.num_prompts)]
    async with aclosing(generate(context, job)) as prompt_outputs:
        async for prompt, output in prompt_outputs:
            outputs[prompt].append(output)
    return writer.whole([merge_outputs(of_prompt) for of_prompt in outputs])


async def generate(context: ServerContext, job: GenerationJob) -> AsyncGenerator[PromptOutput, None]:
    """Runs a job. Closing the generator before its end aborts all of the job.

    Raises:
      ContextLengthError: A prompt is too long.
      RateLimitError: The API key has used up its limit for this minute.
      JaxisError: An error of `AsyncLLMEngine.reserve` or `AsyncLLMEngine.generate`; the generated tokens are lost.
    """
    context.accounting.admit()
    arrival = time.monotonic()
    timeout = context.config.request_timeout_seconds
    try:
        with context.engine.reserve(job.prompts.num_prompts * job.params.n):
            async with asyncio.timeout(timeout):
                owner = context.accounting.client()  # worker threads lack the request's context
                tokenize = functools.partial(context.thinking.tokenize, job, owner)
                prompts = await context.run_in_worker(tokenize, is_quick=job.prompts.is_quick)
                grammars: list[Grammar | None] = [None] * len(prompts)
                if job.is_constrained:
                    grammars = await context.compile(lambda: [job.compile_grammar(prompt) for prompt in prompts])
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
    except RequestError as error:
        if job.answer.grammar is None:
            raise
        raise job.answer.grammar.own(error) from None
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
    engine, usage = context.generator, context.accounting.start()
    with (
        context.metrics.request(job.params, arrival) as request,
        context.trace(job.prompts.operation, request_id, request),
    ):
        if len(prompt.token_ids) + (job.params.max_tokens != 1) > engine.info.max_model_len:
            info = engine.info
            raise ContextLengthError(len(prompt.token_ids), info.max_model_len, may_grow=info.may_grow)
        outputs = engine.generate(
            prompt,
            job.params_with(grammar),
            request_id,
            priority=context.accounting.priority(job.priority),
            client=context.accounting.client(),
            timeout_seconds=timeout,
            final_only=not job.stream,
            grammar=grammar,
        )
        listener = context.thinking.listen(job, prompt, context.accounting.client())
        is_first = not job.params.computes_whole_prompt
        async with aclosing(outputs):
            async for output in outputs:
                if is_first:
                    is_first = False
                    context.repeated_prompts.note(
                        output.prompt_token_ids,
                        output.num_cached_tokens,
                        (context.model.name, prompt.cache_salt),
                        lambda: "disk" in engine.stats().kv_tiers,
                    )
                if listener is not None:
                    listener.add(output)
                request.add(output)
                if usage is not None:
                    usage.add(output)
                yield output


async def _merge(streams: Sequence[AsyncGenerator[RequestOutput, None]]) -> AsyncGenerator[PromptOutput, None]:
    """Yields the streams' outputs as they arrive."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as outputs:
            async for output in outputs:
                yield 0, output
        return
    # Each stream has at most one item in the queue: a slow reader's outputs wait, and merge, in the engine's streams.
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
