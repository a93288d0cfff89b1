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
from jaxis.server.generation.routed_experts import routed_experts_npy
from jaxis.server.generation.timings import Timings
from jaxis.server.http.errors import DONE, DataEvents
from jaxis.server.http.sse import TextEvents, sse_event
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
    """Writer of the answer of /v1/chat/completions, whole or streamed."""

    def __init__(self, request: ChatCompletionRequest, job: GenerationJob) -> None:
        options = request.stream_options
        self._job = job
        self._reader = AnswerReader(job)
        self._num_top = request.top_logprobs or 0
        self._formatter = LogprobFormatter(job.model.tokenizer, bool(request.return_tokens_as_token_ids))
        self._prefix = request.messages[-1].text if request.echo else ""
        self._ends_with_usage = options is not None and bool(options.include_usage)
        self._always_tells_usage = options is not None and bool(options.continuous_usage_stats)
        self._returns_ids = bool(request.return_token_ids)
        self._plain: dict[int, TextEvents] = {}

    def whole(self, outputs: Sequence[RequestOutput]) -> ChatCompletionResponse:
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
            prompt_token_ids=output.prompt_token_ids if self._returns_ids else None,
            seed=output.seed,
            timings=Timings.of(self._reader.counts),
        )

    def add(self, prompt: int, output: RequestOutput) -> str:  # noqa: ARG002 (there is one prompt)
        text = ""
        parts = self._reader.read(output)
        usage = self._usage() if self._always_tells_usage else None
        for completion, events in parts:
            index = completion.index
            if index not in self._plain:
                first = ChatDelta(role="assistant", content=self._prefix)
                # The prompt is the same for all choices.
                ids = output.prompt_token_ids if self._returns_ids and not self._plain else None
                text += self._event([ChatChunkChoice(index=index, delta=first)], usage=usage, prompt_token_ids=ids)
                self._plain[index] = TextEvents(functools.partial(self._text_chunk, index))
            says_more = usage or completion.logprobs or completion.finished or self._returns_ids
            if not says_more and (content := _content_of(events)):
                text += self._plain[index].event(content)
            elif events or completion.logprobs or completion.finished or (self._returns_ids and completion.token_ids):
                # Once all choices have ended, the last of them carries the fields that are the same for all.
                ended = self._ended(output) if output.finished and completion is output.outputs[-1] else {}
                text += self._event([self._chunk_choice(completion, events)], usage=usage, **ended)
        return text

    def end(self) -> str:
        if not self._ends_with_usage:
            return DONE
        return self._event([], usage=self._usage(), timings=Timings.of(self._reader.counts)) + DONE

    def _ended(self, output: RequestOutput) -> dict[str, Any]:
        timings = None if self._ends_with_usage else Timings.of(self._reader.counts)
        return {"kv_transfer_params": output.kv_transfer_params, "seed": output.seed, "timings": timings}

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
        return ChatChoice(message=_message(events, self._prefix), **self._of_choice(completion))

    def _chunk_choice(self, completion: CompletionOutput, events: Iterable[Event]) -> ChatChunkChoice:
        return ChatChunkChoice(delta=_delta(events), **self._of_choice(completion))

    def _of_choice(self, completion: CompletionOutput) -> dict[str, Any]:
        """Returns the fields of a choice beside its text, whole or in a chunk."""
        return {
            "index": completion.index,
            "logprobs": self._logprobs(completion),
            "finish_reason": self._reader.finish_reason(completion),
            "stop_reason": completion.stop_reason,
            "token_ids": completion.token_ids if self._returns_ids else None,
            "routed_experts": routed_experts_npy(completion),
        }

    def _logprobs(self, completion: CompletionOutput) -> ChatLogprobs | None:
        if completion.logprobs is None:
            return None
        return self._formatter.chat(completion.logprobs, self._num_top, completion.kept_mass)


def _message(events: Iterable[Event], prefix: str) -> AssistantMessage:
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
    """Returns the text of events that add only content; None for other events."""
    texts = [event.text if isinstance(event, ContentDelta) else None for event in events]
    return None if None in texts else "".join(text for text in texts if text is not None)


def _delta(events: Iterable[Event]) -> ChatDelta:
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
