"""/v1/responses: the chat endpoint's answer in OpenAI's newer shape, whole or as typed events."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, Literal

from pydantic import BaseModel

from jaxis.errors import RequestError
from jaxis.outputs import RequestOutput
from jaxis.server.endpoints.chat import ChatCompletion
from jaxis.server.endpoints.chat_output import ChatOutput
from jaxis.server.endpoints.chat_prompt import reads_reasoning_effort
from jaxis.server.endpoints.context import ServerContext
from jaxis.server.endpoints.custom_tools import choose_custom_tool
from jaxis.server.endpoints.generation import PromptOutput, generate
from jaxis.server.endpoints.response_output import ResponseEvent, ResponseOutput
from jaxis.server.endpoints.served_model import ServedModel
from jaxis.server.endpoints.usage import UsageCounter
from jaxis.server.http.errors import ApiError, ModelNotFoundError, ParameterError, api_error
from jaxis.server.http.sse import StreamForm
from jaxis.server.protocol.base import ReasoningTokensDetails, SamplingFields, new_id
from jaxis.server.protocol.chat import ChatCompletionRequest
from jaxis.server.protocol.response_tools import offered_tools
from jaxis.server.protocol.responses import (
    IncompleteDetails,
    ResponseError,
    ResponseObject,
    ResponseRequest,
    ResponseStatus,
    ResponseUsage,
)

# Fields of the chat request that have a different name here.
_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
}


# The codes that clients of this endpoint know, for codes of this server's own.
_FAILURE_CODES = {"server_overloaded": "rate_limit_exceeded", "server_unavailable": "server_is_overloaded"}


class ResponseRun(StreamForm):
    """One request, checked and ready to run.

    Attributes:
      job: The generation job.
      left_out: Names of the request's parts that have no effect on this model.

    Args:
      request: The request.
      model: The served model.
      request_id: None generates one.

    Raises:
      RequestError: A field cannot be honoured.
    """

    media_type = "text/event-stream"

    def __init__(self, request: ResponseRequest, model: ServedModel, request_id: str | None = None) -> None:
        if request.top_logprobs is not None and not request.wants_logprobs:
            raise ParameterError("top_logprobs", 'top_logprobs needs include=["message.output_text.logprobs"]: add it')
        self.left_out = request.left_out
        with _own_names():
            model = model.named(request.model)
            chat_request = self._chat_request(request, model)
            tools = choose_custom_tool(request, chat_request, model)
            self._chat = ChatCompletion(chat_request, model, tools=tools)
        if request.wants_logprobs and self._chat.parses:
            raise ParameterError(
                "include",
                "message.output_text.logprobs are those of the whole text, of which reasoning and calls of tools are no"
                " part: leave them out, or ask /v1/chat/completions",
            )
        self.job = self._chat.job
        self._request = request
        self._model = model
        self._id = request_id or new_id("resp")
        self._num_events = 0
        self._has_begun = False
        self._usage = UsageCounter()
        self._reader: ChatOutput | None = None
        self._output = ResponseOutput({tool.function_name: tool for tool, _ in offered_tools(request.tools)})
        self._finish_reason: str | None = None
        self._kv_transfer_params: dict[str, Any] | None = None

    def _chat_request(self, request: ResponseRequest, model: ServedModel) -> ChatCompletionRequest:
        fields = request.chat_fields()
        if not fields["messages"]:
            raise ParameterError("input", "input has nothing to answer but items that have no effect: add a message")
        effort = fields.get("reasoning_effort")
        if effort is not None and not reads_reasoning_effort(effort, model.tokenizer):
            del fields["reasoning_effort"]  # clients send one to every model
            self.left_out.append("reasoning.effort")
        return ChatCompletionRequest(
            model=request.model,
            chat_template_kwargs=request.chat_template_kwargs,
            parallel_tool_calls=request.parallel_tool_calls,
            priority=request.priority,
            stream=request.stream,
            cache_salt=request.cache_salt,
            kv_transfer_params=request.kv_transfer_params,
            **fields,
            **{name: getattr(request, name) for name in SamplingFields.model_fields},
        )

    async def run(self, context: ServerContext) -> ResponseObject:
        """The whole answer."""
        with _own_names():
            async with aclosing(generate(context, self.job)) as prompt_outputs:
                async for prompt_output in prompt_outputs:
                    self._take(prompt_output)
        self._output.finish(self._status)
        return self._ended()

    def response(self, output: RequestOutput) -> ResponseObject:
        """The whole answer from the whole output."""
        self._take((0, output))
        self._output.finish(self._status)
        return self._ended()

    async def stream(self, context: ServerContext) -> AsyncGenerator[str, None]:
        """The answer as server-sent events."""
        with _own_names():
            async with aclosing(generate(context, self.job)) as prompt_outputs:
                async for prompt_output in prompt_outputs:
                    if not self._has_begun:
                        yield self._begin()
                    for event in self._take(prompt_output):
                        yield self._event(*event)
        for event in self._output.finish(self._status):
            yield self._event(*event)
        yield self._event(f"response.{self._status}", {"response": self._ended()})

    def keep_alive(self) -> str:
        """The first events, if they are yet to come, or an event of its own: clients do not count comments."""
        return self._event("keepalive", {}) if self._has_begun else self._begin()

    def failure(self, error: ApiError) -> str:
        """The answer, failed."""
        code = _FAILURE_CODES.get(error.code or "", error.code)
        code = code or ("invalid_prompt" if error.status < 500 else "server_error")
        response = self._response("failed", error=ResponseError(code=code, message=error.message))
        begin = "" if self._has_begun else self._begin()
        return begin + self._event("response.failed", {"response": response})

    def _begin(self) -> str:
        self._has_begun = True
        response = {"response": self._response("in_progress")}
        return self._event("response.created", response) + self._event("response.in_progress", response)

    def _take(self, prompt_output: PromptOutput) -> list[ResponseEvent]:
        self._usage.add(prompt_output)
        self._kv_transfer_params = prompt_output[1].kv_transfer_params
        if self._reader is None:
            self._reader = self._chat.reader(prompt_output[1])
        events = []
        for completion in prompt_output[1].outputs:
            logprobs = self._chat.logprobs(completion)
            events += self._output.add(self._reader.read(completion), logprobs.content if logprobs else None)
            self._finish_reason = completion.finish_reason
        return events

    @property
    def _status(self) -> Literal["completed", "incomplete"]:
        return "incomplete" if self._finish_reason == "length" else "completed"

    def _ended(self) -> ResponseObject:
        counts = self._usage.usage([self._reader] if self._reader else [])
        return self._response(
            self._status,
            output=self._output.items,
            kv_transfer_params=self._kv_transfer_params,
            incomplete_details=IncompleteDetails() if self._status == "incomplete" else None,
            usage=ResponseUsage(
                input_tokens=counts.prompt_tokens,
                input_tokens_details=counts.prompt_tokens_details,
                output_tokens=counts.completion_tokens,
                output_tokens_details=ReasoningTokensDetails(
                    reasoning_tokens=counts.completion_tokens_details.reasoning_tokens
                ),
                total_tokens=counts.total_tokens,
            ),
        )

    def _response(self, status: ResponseStatus, **more: Any) -> ResponseObject:
        request, params = self._request, self.job.params
        given = {name: getattr(request, name) for name in ("tools", "tool_choice", "reasoning", "top_logprobs")}
        if request.text is not None and request.text.format is not None:
            given["text"] = request.text.model_dump(by_alias=True, exclude_unset=True)
        return ResponseObject(
            id=self._id,
            status=status,
            model=self._model.name,
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            metadata=request.metadata or {},
            parallel_tool_calls=request.parallel_tool_calls is not False,
            temperature=params.temperature,
            top_p=params.top_p,
            **{name: value for name, value in given.items() if value is not None},
            **more,
        )

    def _event(self, kind: str, fields: dict[str, Any]) -> str:
        data = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        text = json.dumps(data, default=_dump)
        return f"event: {kind}\ndata: {text}\n\n"


@contextmanager
def _own_names() -> Iterator[None]:
    """Translates field names in errors about the chat request to this endpoint's."""
    try:
        yield
    except ModelNotFoundError:
        raise
    except RequestError as error:
        param = api_error(error).param
        if param not in _NAMES:
            raise
        message = str(error).replace(param, _NAMES[param], 1)
        raise ParameterError(_NAMES[param], message, api_error(error).code) from None


def _dump(value: BaseModel) -> Any:
    return value.model_dump(mode="json")
