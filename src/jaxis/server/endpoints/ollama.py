"""Ollama's /api/chat and /api/generate: the core's answer in Ollama's shape, whole or as lines."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from datetime import UTC, datetime

from jaxis.outputs import CompletionOutput, RequestOutput
from jaxis.server.endpoints.answer_clock import AnswerClock
from jaxis.server.endpoints.chat import ChatCompletion
from jaxis.server.endpoints.chat_output import ChatOutput
from jaxis.server.endpoints.completions import TextCompletion
from jaxis.server.endpoints.context import ServerContext
from jaxis.server.endpoints.generation import GenerationJob, PromptOutput, generate
from jaxis.server.endpoints.logprobs import LogprobFormatter
from jaxis.server.endpoints.model_facts import rfc3339
from jaxis.server.endpoints.ollama_output import AnswerPart, OllamaOutput
from jaxis.server.endpoints.ollama_request import chat_request, own_names, prompt_request
from jaxis.server.endpoints.served_model import ServedModel
from jaxis.server.http.error_shapes import OLLAMA_PATHS
from jaxis.server.http.errors import ApiError
from jaxis.server.http.sse import StreamForm
from jaxis.server.protocol.chat import ChatCompletionRequest, ChatPositionLogprobs
from jaxis.server.protocol.ollama import (
    OllamaAnswer,
    OllamaAnswerMessage,
    OllamaChatAnswer,
    OllamaChatRequest,
    OllamaGenerateAnswer,
    OllamaGenerateRequest,
)
from jaxis.server.protocol.ollama_models import NDJSON


class OllamaRun(StreamForm):
    """One request, checked and ready to run; also the form of its stream.

    Attributes:
      media_type: The stream's content type.
      job: The generation job; None if the request only asks whether the model is loaded.

    Args:
      request: The request.
      model: The served model.

    Raises:
      RequestError: A field cannot be honoured.
    """

    media_type = NDJSON

    def __init__(self, request: OllamaChatRequest | OllamaGenerateRequest, model: ServedModel) -> None:
        self._clock = AnswerClock()
        model = model.named(request.model)
        self._request = request
        self._model = model
        self._num_top = request.top_logprobs or 0
        self._formatter = LogprobFormatter(model.tokenizer)
        self._make_reader: Callable[[RequestOutput], ChatOutput] = lambda _output: ChatOutput(None)
        self.job: GenerationJob | None = None
        if request.messages if isinstance(request, OllamaChatRequest) else request.prompt:
            self.job = self._prepare()
        self._reader: ChatOutput | None = None
        self._output = OllamaOutput()
        self._finish_reason: str | None = None

    async def run(self, context: ServerContext) -> OllamaAnswer:
        """The whole answer."""
        if self.job is None:
            return self._nothing_to_answer()
        answer, logprobs = AnswerPart(), []
        with own_names(self._model.name):
            async with aclosing(generate(context, self.job)) as prompt_outputs:
                async for prompt_output in prompt_outputs:
                    for part in self._take(prompt_output):
                        answer.add(part)
                    logprobs += self._logprobs(prompt_output) or []
        return self._ended(answer, logprobs if self._request.logprobs else None)

    async def stream(self, context: ServerContext) -> AsyncGenerator[str, None]:
        """The answer as lines of JSON."""
        if self.job is None:
            yield _line(self._nothing_to_answer())
            return
        with own_names(self._model.name):
            async with aclosing(generate(context, self.job)) as prompt_outputs:
                async for prompt_output in prompt_outputs:
                    parts, logprobs = self._take(prompt_output), self._logprobs(prompt_output)
                    if logprobs and not parts:
                        parts = [AnswerPart()]
                    for index, part in enumerate(parts):
                        yield _line(self._answer(part, logprobs if index == 0 else None))
        yield _line(self._ended(AnswerPart(), None))

    def keep_alive(self) -> str:
        """A line that says only that the answer is still coming."""
        return _line(self._answer(AnswerPart(), None))

    def failure(self, error: ApiError) -> str:
        """The last line of a stream that has failed."""
        return json.dumps(error.shaped(OLLAMA_PATHS)) + "\n"

    def _prepare(self) -> GenerationJob:
        with own_names(self._model.name):
            if isinstance(self._request, OllamaChatRequest):
                core_request = chat_request(self._request, self._model)
            else:
                core_request = prompt_request(self._request, self._model)
            if not isinstance(core_request, ChatCompletionRequest):
                return TextCompletion(core_request, self._model).job
            chat = ChatCompletion(core_request, self._model)
            self._make_reader = chat.reader
            return chat.job

    def _take(self, prompt_output: PromptOutput) -> list[AnswerPart]:
        _, output = prompt_output
        self._clock.take(output)
        if self._reader is None:
            self._reader = self._make_reader(output)
        parts: list[AnswerPart] = []
        for completion in output.outputs:
            parts += self._output.add(self._reader.read(completion))
            self._finish_reason = completion.finish_reason
        return parts

    def _logprobs(self, prompt_output: PromptOutput) -> list[ChatPositionLogprobs] | None:
        completions: list[CompletionOutput] = prompt_output[1].outputs
        positions = [position for completion in completions for position in completion.logprobs or ()]
        return self._formatter.chat(positions, self._num_top).content if positions else None

    def _answer(
        self, part: AnswerPart, logprobs: list[ChatPositionLogprobs] | None, **more: bool | int | str | None
    ) -> OllamaAnswer:
        fields = {"model": self._model.name, "created_at": rfc3339(datetime.now(UTC)), "logprobs": logprobs, **more}
        thinking = part.thinking or None
        if isinstance(self._request, OllamaGenerateRequest):
            return OllamaGenerateAnswer(response=part.content, thinking=thinking, **fields)
        message = OllamaAnswerMessage(content=part.content, thinking=thinking, tool_calls=part.tool_calls or None)
        return OllamaChatAnswer(message=message, **fields)

    def _ended(self, answer: AnswerPart, logprobs: list[ChatPositionLogprobs] | None) -> OllamaAnswer:
        return self._answer(answer, logprobs, done=True, done_reason=self._finish_reason, **_durations(self._clock))

    def _nothing_to_answer(self) -> OllamaAnswer:
        """What clients send to load the model before its first use, or to unload it; it stays where it is."""
        unload = self._request.keep_alive in (0, "0", "0s")
        return self._answer(AnswerPart(), None, done=True, done_reason="unload" if unload else "load")


def _durations(clock: AnswerClock) -> dict[str, int]:
    """Ollama's counts, and its durations in nanoseconds."""
    return {
        "total_duration": _nanoseconds(clock.total_seconds),
        "load_duration": _nanoseconds(clock.waiting_seconds),
        "prompt_eval_count": clock.num_prompt_tokens,
        "prompt_eval_duration": _nanoseconds(clock.prefill_seconds),
        "eval_count": clock.num_tokens,
        "eval_duration": _nanoseconds(clock.decode_seconds),
    }


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _line(answer: OllamaAnswer) -> str:
    return answer.model_dump_json() + "\n"
