"""The answer of /v1/chat/completions, whole or streamed."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

from jaxis.outputs import CompletionOutput, RequestOutput
from jaxis.parsing.parser_events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArgumentsDelta,
    ToolCallStart,
    collect,
)
from jaxis.server.generation.answer_reader import AnswerReader
from jaxis.server.generation.job import GenerationJob
from jaxis.server.http.sse import DONE, DataEvents, TextEvents, sse_event
from jaxis.server.openai.chat_schema import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatDelta,
    ChatLogprobs,
)
from jaxis.server.openai.fields import ChatToolCall, ChatToolCallDelta, FunctionCall, FunctionCallDelta, Usage
from jaxis.server.openai.logprobs import LogprobFormatter


class ChatAnswer(DataEvents):
    """Writes the answer to a chat request.

    Args:
      request: The request.
      job: Its job.
    """

    def __init__(self, request: ChatCompletionRequest, job: GenerationJob) -> None:
        options = request.stream_options
        self._job = job
        self._reader = AnswerReader(job)
        self._num_top = request.top_logprobs or 0
        self._formatter = LogprobFormatter(job.model.tokenizer, bool(request.return_tokens_as_token_ids))
        self._prefix = request.messages[-1].text if request.echo else ""
        self._ends_with_usage = options is not None and bool(options.include_usage)
        self._always_tells_usage = options is not None and bool(options.continuous_usage_stats)
        self._plain: dict[int, TextEvents] = {}

    def whole(self, outputs: Sequence[RequestOutput]) -> ChatCompletionResponse:
        """The whole answer."""
        [output] = outputs
        choices = [self._choice(completion, events) for completion, events in self._reader.read(output)]
        prompt_logprobs = output.prompt_logprobs
        return ChatCompletionResponse(
            id=self._job.request_id,
            model=self._job.model.name,
            system_fingerprint=self._job.model.fingerprint,
            choices=choices,
            usage=self._usage(),
            prompt_logprobs=None if prompt_logprobs is None else self._formatter.prompt(prompt_logprobs),
            kv_transfer_params=output.kv_transfer_params,
        )

    def add(self, prompt: int, output: RequestOutput) -> str:  # noqa: ARG002 (there is one prompt)
        """The chunks of an output."""
        text = ""
        parts = self._reader.read(output)
        usage = self._usage() if self._always_tells_usage else None
        for completion, events in parts:
            index = completion.index
            if index not in self._plain:
                first = ChatDelta(role="assistant", content=self._prefix)
                text += self._event([ChatChunkChoice(index=index, delta=first)], usage=usage)
                self._plain[index] = TextEvents(functools.partial(self._text_chunk, index))
            says_more = usage or completion.logprobs or completion.finished
            if not says_more and (content := _content_of(events)):
                text += self._plain[index].event(content)
            elif events or completion.logprobs or completion.finished:
                # The parameters are there once all choices have ended, and are sent once.
                transfer = output.kv_transfer_params if completion is output.outputs[-1] else None
                choice = self._chunk_choice(completion, events)
                text += self._event([choice], usage=usage, kv_transfer_params=transfer)
        return text

    def end(self) -> str:
        """The token counts, if they were asked for, and the stream's end."""
        if not self._ends_with_usage:
            return DONE
        return self._event([], usage=self._usage()) + DONE

    def _usage(self) -> Usage:
        return Usage.of(self._reader.counts, self._reader.num_reasoning_tokens)

    def _event(self, choices: list[ChatChunkChoice], **more: Any) -> str:
        return sse_event(self._chunk(choices, **more))

    def _text_chunk(self, index: int, text: str) -> ChatCompletionChunk:
        return self._chunk([ChatChunkChoice(index=index, delta=ChatDelta(content=text))])

    def _chunk(self, choices: list[ChatChunkChoice], **more: Any) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self._job.request_id,
            model=self._job.model.name,
            system_fingerprint=self._job.model.fingerprint,
            choices=choices,
            **more,
        )

    def _choice(self, completion: CompletionOutput, events: Iterable[Event]) -> ChatChoice:
        return ChatChoice(
            index=completion.index,
            message=_message(events, self._prefix),
            logprobs=self._logprobs(completion),
            finish_reason=self._reader.finish_reason(completion),
            stop_reason=completion.stop_reason,
        )

    def _chunk_choice(self, completion: CompletionOutput, events: Iterable[Event]) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=completion.index,
            delta=_delta(events),
            logprobs=self._logprobs(completion),
            finish_reason=self._reader.finish_reason(completion),
            stop_reason=completion.stop_reason,
        )

    def _logprobs(self, completion: CompletionOutput) -> ChatLogprobs | None:
        if completion.logprobs is None:
            return None
        return self._formatter.chat(completion.logprobs, self._num_top)


def _message(events: Iterable[Event], prefix: str) -> AssistantMessage:
    """The whole message; `prefix` comes before its content."""
    output = collect(events)
    calls = [
        ChatToolCall(id=call.id, function=FunctionCall(name=call.name, arguments=call.arguments))
        for call in output.tool_calls
    ]
    content = prefix + output.content
    return AssistantMessage(
        content=content or (None if calls else ""),
        reasoning_content=output.reasoning or None,
        tool_calls=calls or None,
    )


def _content_of(events: Iterable[Event]) -> str | None:
    """The text of events that add nothing but content; None of others."""
    texts = [event.text if isinstance(event, ContentDelta) else None for event in events]
    return None if None in texts else "".join(text for text in texts if text is not None)


def _delta(events: Iterable[Event]) -> ChatDelta:
    """A chunk's addition to a message."""
    content = reasoning = ""
    calls: dict[int, ChatToolCallDelta] = {}
    for event in events:
        match event:
            case ContentDelta(text):
                content += text
            case ReasoningDelta(text):
                reasoning += text
            case ToolCallStart(index, call_id, name):
                function = FunctionCallDelta(name=name, arguments="")
                calls[index] = ChatToolCallDelta(index=index, id=call_id, type="function", function=function)
            case ToolCallArgumentsDelta(index, text):
                call = calls.setdefault(index, ChatToolCallDelta(index=index, function=FunctionCallDelta()))
                call.function.arguments = (call.function.arguments or "") + text
    if not (calls or reasoning):
        return ChatDelta(content=content or None)  # most chunks by far
    return ChatDelta(
        content=content or None, reasoning_content=reasoning or None, tool_calls=list(calls.values()) or None
    )
