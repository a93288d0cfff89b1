"""Answers of Ollama's /api/chat and /api/generate, whole or as lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from jaxis.outputs import RequestOutput
from jaxis.parsing.parser_events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)
from jaxis.server.generation.answer_reader import AnswerReader
from jaxis.server.generation.job import GenerationJob
from jaxis.server.generation.model_info import rfc3339
from jaxis.server.ollama.ollama_errors import OllamaLines
from jaxis.server.ollama.ollama_schema import (
    OllamaAnswer,
    OllamaAnswerMessage,
    OllamaChatAnswer,
    OllamaChatRequest,
    OllamaFunctionCall,
    OllamaGenerateAnswer,
    OllamaGenerateRequest,
    OllamaToolCall,
)
from jaxis.server.openai.logprobs import ChatPositionLogprobs, LogprobFormatter


class OllamaAnswerWriter(OllamaLines):
    def __init__(self, request: OllamaChatRequest | OllamaGenerateRequest, job: GenerationJob) -> None:
        self._request = request
        self._model = job.model.name
        self._reader = AnswerReader(job)
        self._formatter = LogprobFormatter(job.model.tokenizer)
        self._parts = _PartReader()
        self._finish_reason: str | None = None

    def whole(self, outputs: Sequence[RequestOutput]) -> OllamaAnswer:
        [output] = outputs
        parts = self._take(output)
        answer = AnswerPart(
            "".join(part.content for part in parts),
            "".join(part.thinking for part in parts),
            [call for part in parts for call in part.tool_calls],
        )
        return self._ended(answer, (self._logprobs(output) or []) if self._request.logprobs else None)

    def add(self, prompt: int, output: RequestOutput) -> str:  # noqa: ARG002 (there is one prompt)
        parts, logprobs = self._take(output), self._logprobs(output)
        if logprobs and not parts:
            parts = [AnswerPart()]
        return "".join(_line(self._answer(part, logprobs if i == 0 else None)) for i, part in enumerate(parts))

    def end(self) -> str:
        return _line(self._ended(AnswerPart(), None))

    def keep_alive(self) -> str:
        return _line(self._answer(AnswerPart(), None))

    def _take(self, output: RequestOutput) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        for completion, events in self._reader.read(output):
            parts += self._parts.add(events)
            self._finish_reason = completion.finish_reason
        return parts

    def _logprobs(self, output: RequestOutput) -> list[ChatPositionLogprobs] | None:
        positions = [position for completion in output.outputs for position in completion.logprobs or ()]
        return self._formatter.chat(positions, self._request.top_logprobs or 0).content if positions else None

    def _answer(self, part: AnswerPart, logprobs: list[ChatPositionLogprobs] | None, **more: Any) -> OllamaAnswer:
        return _answer(self._request, self._model, part, logprobs=logprobs, **more)

    def _ended(self, answer: AnswerPart, logprobs: list[ChatPositionLogprobs] | None) -> OllamaAnswer:
        """Returns the answer, or its last line, with Ollama's counts, and durations in nanoseconds."""
        counts = self._reader.counts
        return self._answer(
            answer,
            logprobs,
            done=True,
            done_reason=self._finish_reason,
            total_duration=_nanoseconds(counts.total_seconds),
            load_duration=_nanoseconds(counts.waiting_seconds),
            prompt_eval_count=counts.num_prompt_tokens,
            prompt_eval_duration=_nanoseconds(counts.prefill_seconds),
            eval_count=counts.num_tokens,
            eval_duration=_nanoseconds(counts.decode_seconds),
        )


def empty_answer(
    request: OllamaChatRequest | OllamaGenerateRequest, model: str, reason: Literal["load", "unload"]
) -> OllamaAnswer:
    """Returns the answer to a request without a prompt, which clients send to load or unload a model."""
    return _answer(request, model, AnswerPart(), done=True, done_reason=reason)


@dataclass
class AnswerPart:
    """A part of an answer: a line's addition, or the whole, with complete calls."""

    content: str = ""
    thinking: str = ""
    tool_calls: list[OllamaToolCall] = field(default_factory=list)


class _PartReader:
    """Reader of the events of one answer.

    Ollama's arguments are objects, so a call is sent only when it has ended. A call that the end of the answer cut off
    is left out; the answer's finish reason reports the cut.
    """

    def __init__(self) -> None:
        self._open: OllamaToolCall | None = None
        self._arguments = ""
        self._num_calls = 0

    def add(self, events: Iterable[Event]) -> list[AnswerPart]:
        """Returns the parts of a step's events: one for neighbouring text and reasoning, and one for each call."""
        parts: list[AnswerPart] = []
        for event in events:
            match event:
                case ContentDelta(text):
                    _text_part(parts).content += text
                case ReasoningDelta(text):
                    _text_part(parts).thinking += text
                case ToolCallStart(_, call_id, name):
                    function = OllamaFunctionCall(index=self._num_calls, name=name)
                    self._open, self._arguments = OllamaToolCall(id=call_id, function=function), ""
                case ToolCallArgumentsDelta(_, text):
                    self._arguments += text
                case ToolCallEnd(_, status):
                    if self._open is not None and status == "complete":
                        self._open.function.arguments = json.loads(self._arguments)
                        parts.append(AnswerPart(tool_calls=[self._open]))
                        self._num_calls += 1
                    self._open = None
        return parts


def _text_part(parts: list[AnswerPart]) -> AnswerPart:
    if not parts or parts[-1].tool_calls:
        parts.append(AnswerPart())
    return parts[-1]


def _answer(
    request: OllamaChatRequest | OllamaGenerateRequest, model: str, part: AnswerPart, **more: Any
) -> OllamaAnswer:
    fields = {"model": model, "created_at": rfc3339(datetime.now(UTC)), **more}
    thinking = part.thinking or None
    if isinstance(request, OllamaGenerateRequest):
        return OllamaGenerateAnswer(response=part.content, thinking=thinking, **fields)
    message = OllamaAnswerMessage(content=part.content, thinking=thinking, tool_calls=part.tool_calls or None)
    return OllamaChatAnswer(message=message, **fields)


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _line(answer: OllamaAnswer) -> str:
    return answer.model_dump_json() + "\n"
