"""/v1/responses: the chat endpoint's answer in OpenAI's newer shape, whole or as typed events."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from pydantic import BaseModel

from jaxis.outputs import CompletionOutput, RequestOutput
from jaxis.server.chat import ChatCompletion
from jaxis.server.context import ServerContext
from jaxis.server.generation import PromptOutput, generate
from jaxis.server.protocol.base import SamplingFields, new_id
from jaxis.server.protocol.chat import ChatCompletionRequest
from jaxis.server.protocol.responses import (
    IncompleteDetails,
    OutputMessage,
    OutputText,
    ResponseObject,
    ResponseRequest,
    ResponseUsage,
)
from jaxis.server.served_model import ServedModel
from jaxis.server.usage import UsageCounter


class ResponseRun:
    """One request, checked and ready to run.

    Attributes:
      job: What it wants generated.

    Args:
      request: The request.
      model: The model that is to answer.
      request_id: None makes one.

    Raises:
      RequestError: A field cannot be honoured.
    """

    def __init__(self, request: ResponseRequest, model: ServedModel, request_id: str | None = None) -> None:
        chat_request = ChatCompletionRequest(
            model=request.model,
            messages=request.messages(),
            max_completion_tokens=request.max_output_tokens,
            chat_template_kwargs=request.chat_template_kwargs,
            priority=request.priority,
            stream=request.stream,
            cache_salt=request.cache_salt,
            **{name: getattr(request, name) for name in SamplingFields.model_fields},
        )
        self._request = request
        self._model = model
        self.job = ChatCompletion(chat_request, model).job
        self._id = request_id or new_id("resp")
        self._message_id = new_id("msg")
        self._num_events = 0
        self._usage = UsageCounter()
        self._text = ""
        self._finish_reason: str | None = None

    async def run(self, context: ServerContext) -> ResponseObject:
        """The whole answer."""
        async with aclosing(generate(context, self.job)) as prompt_outputs:
            async for prompt_output in prompt_outputs:
                self._take(prompt_output)
        return self._ended()

    def response(self, output: RequestOutput) -> ResponseObject:
        """The whole answer from the whole output."""
        self._take((0, output))
        return self._ended()

    async def stream(self, context: ServerContext) -> AsyncGenerator[str, None]:
        """The answer as server-sent events."""
        place = {"item_id": self._message_id, "output_index": 0, "content_index": 0}
        begun = False
        async with aclosing(generate(context, self.job)) as prompt_outputs:
            async for prompt_output in prompt_outputs:
                if not begun:
                    begun = True
                    for event in self._first_events(place):
                        yield event
                for completion in self._take(prompt_output):
                    if completion.text:
                        yield self._event("response.output_text.delta", **place, delta=completion.text, logprobs=[])
        for event in self._last_events(place):
            yield event

    def _take(self, prompt_output: PromptOutput) -> list[CompletionOutput]:
        self._usage.add(prompt_output)
        completions = prompt_output[1].outputs
        for completion in completions:
            self._text += completion.text
            self._finish_reason = completion.finish_reason
        return completions

    def _first_events(self, place: dict[str, Any]) -> list[str]:
        response = self._response("in_progress")
        item = OutputMessage(id=self._message_id, status="in_progress", content=[])
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
            self._event("response.output_item.added", output_index=0, item=item),
            self._event("response.content_part.added", **place, part=OutputText(text="")),
        ]

    def _last_events(self, place: dict[str, Any]) -> list[str]:
        response = self._ended()
        [item] = response.output
        return [
            self._event("response.output_text.done", **place, text=self._text, logprobs=[]),
            self._event("response.content_part.done", **place, part=item.content[0]),
            self._event("response.output_item.done", output_index=0, item=item),
            self._event(f"response.{response.status}", response=response),
        ]

    def _ended(self) -> ResponseObject:
        status = "incomplete" if self._finish_reason == "length" else "completed"
        item = OutputMessage(id=self._message_id, status=status, content=[OutputText(text=self._text)])
        counts = self._usage.usage()
        return self._response(
            status,
            output=[item],
            incomplete_details=IncompleteDetails() if status == "incomplete" else None,
            usage=ResponseUsage(
                input_tokens=counts.prompt_tokens,
                input_tokens_details=counts.prompt_tokens_details,
                output_tokens=counts.completion_tokens,
                total_tokens=counts.total_tokens,
            ),
        )

    def _response(self, status: str, **more: Any) -> ResponseObject:
        request, params = self._request, self.job.params
        return ResponseObject(
            id=self._id,
            status=status,
            model=self._model.name,
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            metadata=request.metadata or {},
            temperature=params.temperature,
            top_p=params.top_p,
            **more,
        )

    def _event(self, kind: str, **fields: Any) -> str:
        data = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        text = json.dumps(data, default=_dump)
        return f"event: {kind}\ndata: {text}\n\n"


def _dump(value: BaseModel) -> Any:
    return value.model_dump(mode="json")
