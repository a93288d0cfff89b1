"""/v1/completions: completes prompts, whole or streamed."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from jaxis.engine.frontend.output_stream import merge_outputs
from jaxis.errors import RequestError
from jaxis.outputs import CompletionOutput, RequestOutput
from jaxis.prompts import TokenizedPrompt
from jaxis.server.endpoints.context import ServerContext
from jaxis.server.endpoints.generation import GenerationJob, generate
from jaxis.server.endpoints.logprobs import LogprobFormatter
from jaxis.server.endpoints.sampling import check_stream_options, completion_sampling_params
from jaxis.server.endpoints.served_model import ServedModel
from jaxis.server.endpoints.usage import UsageCounter
from jaxis.server.http.sse import DONE, DataEvents, TextEvents, sse_event
from jaxis.server.protocol.base import Usage, new_id
from jaxis.server.protocol.completions import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
)
from jaxis.tokenizer import Tokenizer

QUICK_LENGTH = 1000  # characters, or token ids: tokenized in a tenth of a millisecond


class TextCompletion(DataEvents):
    """One request for completions, checked and ready to run.

    Attributes:
      job: The generation job.

    Args:
      request: The request.
      model: The served model.
      request_id: None generates one.

    Raises:
      RequestError: A field cannot be honoured.
    """

    def __init__(self, request: CompletionRequest, model: ServedModel, request_id: str | None = None) -> None:
        model = model.named(request.model)
        check_stream_options(request)
        prompts = request.prompts()
        self._request = request
        self._model = model
        self._params, grammar = completion_sampling_params(request, model.default_sampling_params)
        self._formatter = LogprobFormatter(model.tokenizer, bool(request.return_tokens_as_token_ids))
        self._offsets: dict[int, int] = {}  # per choice: characters so far
        self._prompt_logprobs: dict[int, list] = {}  # per prompt
        self.job = GenerationJob(
            request_id=request_id or new_id("cmpl"),
            num_prompts=len(prompts),
            preprocess=functools.partial(_tokenize, prompts, model.tokenizer, request),
            params=self._params,
            compile_grammar=grammar and (lambda _prompt: grammar.compile(model.grammar_compiler)),
            priority=request.priority or 0,
            stream=bool(request.stream),
            is_quick=sum(map(len, prompts)) <= QUICK_LENGTH,
            operation="text_completion",
        )

    async def run(self, context: ServerContext) -> CompletionResponse:
        """The whole answer."""
        outputs: list[list[RequestOutput]] = [[] for _ in range(self.job.num_prompts)]
        async with aclosing(generate(context, self.job)) as prompt_outputs:
            async for index, output in prompt_outputs:
                outputs[index].append(output)
        return self.response([merge_outputs(of_prompt) for of_prompt in outputs])

    def response(self, outputs: Sequence[RequestOutput]) -> CompletionResponse:
        """The whole answer from the whole output of each prompt."""
        usage = UsageCounter()
        choices = []
        for index, output in enumerate(outputs):
            self._trim(output)
            usage.add((index, output))
            choices += [self._choice(index, output, completion) for completion in output.outputs]
        answer = self._answer(choices, usage.usage())
        # The same for each prompt: they do not name blocks.
        answer.kv_transfer_params = outputs[0].kv_transfer_params
        return answer

    async def stream(self, context: ServerContext) -> AsyncGenerator[str, None]:
        """The answer as server-sent events."""
        options = self._request.stream_options
        usage = UsageCounter()
        counts = options is not None and bool(options.continuous_usage_stats)
        plain: dict[int, TextEvents] = {}
        async with aclosing(generate(context, self.job)) as prompt_outputs:
            async for prompt_output in prompt_outputs:
                index, output = prompt_output
                self._trim(output)
                usage.add(prompt_output)
                if not counts and (text := _plain_text(output)):
                    number = index * self._params.n + output.outputs[0].index
                    if number in plain:
                        yield plain[number].event(text)
                        continue
                    plain[number] = TextEvents(functools.partial(self._text_chunk, number))
                choices = [self._choice(index, output, completion) for completion in output.outputs]
                choices = [choice for choice in choices if choice.text or choice.logprobs or choice.finish_reason]
                if choices:
                    # The parameters are there once all choices of the prompt have ended.
                    yield self._event(choices, usage.usage() if counts else None, output.kv_transfer_params)
        if options and options.include_usage:
            yield self._event([], usage.usage())
        yield DONE

    def _text_chunk(self, number: int, text: str) -> CompletionResponse:
        return self._answer([CompletionChoice(index=number, text=text)], None)

    def _event(
        self, choices: list[CompletionChoice], usage: Usage | None, transfer: dict[str, Any] | None = None
    ) -> str:
        answer = self._answer(choices, usage)
        answer.kv_transfer_params = transfer
        return sse_event(answer)

    def _answer(self, choices: list[CompletionChoice], usage: Usage | None) -> CompletionResponse:
        return CompletionResponse(
            id=self.job.request_id,
            model=self._model.name,
            system_fingerprint=self._model.fingerprint,
            choices=choices,
            usage=usage,
        )

    def _trim(self, output: RequestOutput) -> None:
        """Removes the one token that the engine generates even if none was requested."""
        if self._request.max_tokens == 0:
            for completion in output.outputs:
                completion.text, completion.token_ids = "", []
                completion.finish_reason, completion.stop_reason = "length", None
                if completion.logprobs is not None:
                    completion.logprobs = []

    def _choice(self, index: int, output: RequestOutput, completion: CompletionOutput) -> CompletionChoice:
        """A choice, or the addition of a step to it."""
        number = index * self._params.n + completion.index
        is_first = number not in self._offsets
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[index] = output.prompt_logprobs
        text, logprobs = completion.text, None
        if self._request.echo and is_first:
            text = self._prompt_text(output) + text
        if completion.logprobs is not None:
            logprobs = self._logprobs(number, output, completion, self._prompt_logprobs.get(index))
        self._offsets.setdefault(number, 0)
        prompt_logprobs = self._prompt_logprobs.get(index) if is_first else None
        if self._request.prompt_logprobs is None:
            prompt_logprobs = None
        return CompletionChoice(
            index=number,
            text=text,
            logprobs=logprobs,
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            prompt_logprobs=None if prompt_logprobs is None else self._formatter.prompt(prompt_logprobs),
        )

    def _logprobs(
        self, number: int, output: RequestOutput, completion: CompletionOutput, prompt_logprobs: list | None
    ) -> CompletionLogprobs:
        token_ids, positions = completion.token_ids, list(completion.logprobs or [])
        if self._request.echo and number not in self._offsets:
            token_ids = output.prompt_token_ids + token_ids
            positions = (prompt_logprobs or []) + positions
        offset = self._offsets.get(number, 0)
        logprobs, self._offsets[number] = self._formatter.completion(token_ids, positions, offset)
        return logprobs

    def _prompt_text(self, output: RequestOutput) -> str:
        tokenizer = self._model.tokenizer
        if output.prompt is not None or tokenizer is None:
            return output.prompt or ""
        return tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)


def _plain_text(output: RequestOutput) -> str | None:
    """The text of an output that adds nothing but text to one completion; None of others."""
    if len(output.outputs) != 1 or output.outputs[0].logprobs or output.outputs[0].finished:
        return None
    return output.outputs[0].text


def _tokenize(
    prompts: list[str] | list[list[int]], tokenizer: Tokenizer | None, request: CompletionRequest
) -> list[TokenizedPrompt]:
    tokenized = []
    for prompt in prompts:
        if not isinstance(prompt, str):
            tokenized.append(TokenizedPrompt(None, prompt, request.cache_salt))
        elif tokenizer is None:
            raise RequestError("prompt is text, and the model has no tokenizer: send token ids")
        else:
            token_ids = tokenizer.encode(prompt, add_special_tokens=request.add_special_tokens is not False)
            tokenized.append(TokenizedPrompt(prompt, token_ids, request.cache_salt))
    return tokenized
