"""/v1/messages: the chat endpoint's answer in Anthropic's shape, whole or as typed events."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing

from jaxis.outputs import CompletionOutput
from jaxis.server.endpoints.chat import ChatCompletion
from jaxis.server.endpoints.chat_output import ChatOutput
from jaxis.server.endpoints.context import ServerContext
from jaxis.server.endpoints.generation import PromptOutput, generate
from jaxis.server.endpoints.message_output import MessageEvent, MessageOutput, fold, sse_text
from jaxis.server.endpoints.messages_prompt import chat_request, own_names
from jaxis.server.endpoints.served_model import ServedModel
from jaxis.server.endpoints.usage import UsageCounter
from jaxis.server.http.error_shapes import anthropic_error
from jaxis.server.http.errors import ApiError
from jaxis.server.http.sse import StreamForm
from jaxis.server.protocol.messages import CountTokensRequest, MessagesRequest
from jaxis.server.protocol.messages_answer import (
    AnswerMessage,
    MessageUsage,
    OutputTokensDetails,
    StopReason,
    TokenCount,
)


class MessageRun(StreamForm):
    """One request, checked and ready to run.

    Args:
      request: The request.
      model: The served model.

    Raises:
      RequestError: A field cannot be honoured.
    """

    media_type = "text/event-stream"

    def __init__(self, request: MessagesRequest, model: ServedModel) -> None:
        model = model.named(request.model)
        self._request = request
        self._model = model
        self._id = f"msg_{uuid.uuid4().hex}"
        with own_names():
            self._chat = ChatCompletion(chat_request(request, model), model, self._id)
        self._usage = UsageCounter()
        self._reader: ChatOutput | None = None
        self._output = MessageOutput()
        self._last: CompletionOutput | None = None

    async def run(self, context: ServerContext) -> AnswerMessage:
        """The whole answer: what the stream adds up to."""
        return fold([event async for step in self._steps(context) for event in step])

    async def stream(self, context: ServerContext) -> AsyncGenerator[str, None]:
        """The answer as server-sent events."""
        async with aclosing(self._steps(context)) as steps:
            async for events in steps:
                if events:
                    yield "".join(map(sse_text, events))

    def keep_alive(self) -> str:
        """An event that clients take for a sign of life, and nothing else."""
        return sse_text({"type": "ping"})

    def failure(self, error: ApiError) -> str:
        """The error, as the last event."""
        return sse_text(anthropic_error(error.status, error.message))

    async def _steps(self, context: ServerContext) -> AsyncGenerator[list[MessageEvent], None]:
        """The answer's events, those of a step of the engine together."""
        with own_names():
            async with aclosing(generate(context, self._chat.job)) as prompt_outputs:
                async for prompt_output in prompt_outputs:
                    yield self._take(prompt_output)
        stop_reason, stop_sequence = self._stop()
        delta = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
        ended = {"type": "message_delta", "delta": delta, "usage": self._counts().model_dump()}
        yield [*(self._output.finish() if self._request.max_tokens else []), ended, {"type": "message_stop"}]

    def _take(self, prompt_output: PromptOutput) -> list[MessageEvent]:
        told: list[MessageEvent] = []
        if self._reader is None:
            self._reader = self._chat.reader(prompt_output[1])
            self._usage.add((0, dataclasses.replace(prompt_output[1], outputs=[])))
            message = AnswerMessage(id=self._id, model=self._model.name, usage=self._counts())
            told.append({"type": "message_start", "message": message.model_dump()})
        self._usage.add(prompt_output)
        [self._last] = prompt_output[1].outputs
        events = self._reader.read(self._last)
        # With max_tokens=0 one token is generated all the same, as the engine always does, and left out.
        return told + (self._output.add(events) if self._request.max_tokens else [])

    def _stop(self) -> tuple[StopReason, str | None]:
        """Why the answer ended, and the stop sequence that ended it."""
        assert self._last is not None
        if self._last.finish_reason == "length" or not self._request.max_tokens:
            return "max_tokens", None
        text = self._last.stop_reason
        if isinstance(text, str) and text in (self._request.stop_sequences or ()):
            return "stop_sequence", text
        return ("tool_use" if self._output.num_calls and not self._output.is_cut else "end_turn"), None

    def _counts(self) -> MessageUsage:
        counts = self._usage.usage([self._reader] if self._reader else [])
        num_cached = counts.prompt_tokens_details.cached_tokens
        return MessageUsage(
            input_tokens=counts.prompt_tokens - num_cached,
            output_tokens=counts.completion_tokens if self._request.max_tokens else 0,
            cache_read_input_tokens=num_cached,
            output_tokens_details=OutputTokensDetails(
                thinking_tokens=counts.completion_tokens_details.reasoning_tokens if self._request.max_tokens else 0
            ),
        )


async def count_tokens(request: CountTokensRequest, context: ServerContext) -> TokenCount:
    """The length of the prompt that a message with these fields has. Takes no place in the queue of the engine.

    Raises:
      RequestError: A field cannot be honoured.
    """
    # Not the tokenizer that refuses what cannot fit: how much too long a prompt is, is worth knowing.
    model = dataclasses.replace(context.model, tokenizer=context.engine.tokenizer)
    with own_names():
        chat = ChatCompletion(chat_request(request, model), model)
        async with context.token_counts:
            [prompt] = await context.preprocess(chat.job.preprocess)
    return TokenCount(input_tokens=len(prompt.token_ids))
