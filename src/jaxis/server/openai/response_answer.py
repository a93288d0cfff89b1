"""The answer of /v1/responses, whole or as typed events."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel

from jaxis.outputs import RequestOutput
from jaxis.parsing.parser_events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
    without_malformed_calls,
)
from jaxis.server.generation.answer_reader import AnswerReader
from jaxis.server.generation.job import GenerationJob
from jaxis.server.generation.timings import Timings
from jaxis.server.http.body import new_id
from jaxis.server.http.errors import ApiError
from jaxis.server.http.sse import StreamForm
from jaxis.server.openai.fields import PromptTokensDetails, ReasoningTokensDetails
from jaxis.server.openai.logprobs import ChatPositionLogprobs, LogprobFormatter
from jaxis.server.openai.response_items import (
    CustomToolCallItem,
    FunctionCallItem,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
)
from jaxis.server.openai.response_schema import (
    IncompleteDetails,
    ResponseError,
    ResponseObject,
    ResponseRequest,
    ResponseStatus,
    ResponseUsage,
)
from jaxis.server.openai.response_tools import OfferedTool, custom_input, offered_tools

# An event's type and its fields.
ResponseEvent = tuple[str, dict[str, Any]]

# The codes that clients of this endpoint know, for codes of this server's own.
_FAILURE_CODES = {"server_overloaded": "rate_limit_exceeded", "server_unavailable": "server_is_overloaded"}


class ResponseAnswer(StreamForm):
    """Writes the answer to a request of /v1/responses.

    Args:
      request: The request.
      job: Its job.
      record: Called with the whole answer once it has ended, before its client gets it.
    """

    media_type = "text/event-stream"

    def __init__(
        self, request: ResponseRequest, job: GenerationJob, record: Callable[[ResponseObject], None] = lambda _: None
    ) -> None:
        self._request, self._record = request, record
        self._job = job
        self._num_events = 0
        self._has_begun = False
        self._reader = AnswerReader(job)
        self._formatter = LogprobFormatter(job.model.tokenizer)
        self._items = ResponseItems({tool.function_name: tool for tool in offered_tools(request.tools)})
        self._finish_reason: str | None = None
        self._kv_transfer_params: dict[str, Any] | None = None
        self._seed: int | None = None
        self._returns_ids = bool(request.return_token_ids)
        self._prompt_token_ids: list[int] = []
        self._token_ids: list[int] = []
        self._num_told_ids = 0

    def whole(self, outputs: Sequence[RequestOutput]) -> ResponseObject:
        """The whole answer."""
        [output] = outputs
        self._take(output, is_whole=True)
        self._items.finish(self._status)
        return self._ended()

    def add(self, prompt: int, output: RequestOutput) -> str:  # noqa: ARG002 (there is one prompt)
        """The events of an output."""
        begin = "" if self._has_begun else self._begin()
        return begin + self._events(self._take(output))

    def end(self) -> str:
        """The last events."""
        events = self._events(self._items.finish(self._status))
        return events + self._event(f"response.{self._status}", {"response": self._ended()})

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

    def _take(self, output: RequestOutput, *, is_whole: bool = False) -> list[ResponseEvent]:
        self._kv_transfer_params, self._seed = output.kv_transfer_params, output.seed
        self._prompt_token_ids = output.prompt_token_ids
        told: list[ResponseEvent] = []
        for completion, events in self._reader.read(output):
            logprobs = None
            if completion.logprobs is not None:
                num_top = self._request.top_logprobs or 0
                logprobs = self._formatter.chat(completion.logprobs, num_top, completion.kept_mass).content
            told += self._items.add(without_malformed_calls(events) if is_whole else events, logprobs)
            self._token_ids += completion.token_ids
            self._finish_reason = completion.finish_reason
        return told

    @property
    def _status(self) -> Literal["completed", "incomplete"]:
        return "incomplete" if self._finish_reason == "length" else "completed"

    def _ended(self) -> ResponseObject:
        counts = self._reader.counts
        response = self._response(
            self._status,
            output=self._items.items,
            kv_transfer_params=self._kv_transfer_params,
            prompt_token_ids=self._prompt_token_ids if self._returns_ids else None,
            token_ids=self._token_ids if self._returns_ids else None,
            seed=self._seed,
            timings=Timings.of(counts),
            incomplete_details=IncompleteDetails() if self._status == "incomplete" else None,
            usage=ResponseUsage(
                input_tokens=counts.num_prompt_tokens,
                input_tokens_details=PromptTokensDetails(cached_tokens=counts.num_cached_tokens),
                output_tokens=counts.num_tokens,
                output_tokens_details=ReasoningTokensDetails(reasoning_tokens=self._reader.num_reasoning_tokens),
                total_tokens=counts.num_prompt_tokens + counts.num_tokens,
            ),
        )
        self._record(response)
        return response

    def _response(self, status: ResponseStatus, **more: Any) -> ResponseObject:
        request, params = self._request, self._job.params
        given = {name: getattr(request, name) for name in ("tools", "tool_choice", "reasoning", "top_logprobs")}
        if request.text is not None and request.text.format is not None:
            given["text"] = request.text.model_dump(by_alias=True, exclude_unset=True)
        return ResponseObject(
            id=self._job.request_id,
            status=status,
            model=self._job.model.name,
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            metadata=request.metadata or {},
            store=request.store is True,
            previous_response_id=request.previous_response_id,
            parallel_tool_calls=request.parallel_tool_calls is not False,
            temperature=params.temperature,
            top_p=params.top_p,
            **{name: value for name, value in given.items() if value is not None},
            **more,
        )

    def _events(self, events: Iterable[ResponseEvent]) -> str:
        return "".join(self._event(*event) for event in events)

    def _event(self, kind: str, fields: dict[str, Any]) -> str:
        if self._returns_ids and kind.endswith(".delta"):
            # Those of tokens that gave no text come with the next event; the whole answer at the end has all.
            fields = {**fields, "token_ids": self._token_ids[self._num_told_ids :]}
            self._num_told_ids = len(self._token_ids)
        data = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        text = json.dumps(data, default=_dump)
        return f"event: {kind}\ndata: {text}\n\n"


def _dump(value: BaseModel) -> Any:
    return value.model_dump(mode="json")


class ResponseItems:
    """Builds a response's items one after the other: each stretch of reasoning or text, and each call, is one.

    A malformed call stays an incomplete item, since a stream has announced it; its text follows as a message.

    Attributes:
      items: The items so far.

    Args:
      tools: Tools of the functions that the model sees, by their names.
    """

    def __init__(self, tools: Mapping[str, OfferedTool]) -> None:
        self.items: list[OutputItem] = []
        self._tools = tools
        self._open: OutputItem | None = None
        self._text = ""  # of the open item: its text, reasoning, or arguments
        self._logprobs: list[ChatPositionLogprobs] = []
        self._waiting_logprobs: list[ChatPositionLogprobs] = []  # of tokens without text so far

    def add(self, events: Iterable[Event], logprobs: list[ChatPositionLogprobs] | None = None) -> list[ResponseEvent]:
        """Adds a step's events; `logprobs` belong to its tokens, and are sent with the text that comes next."""
        self._waiting_logprobs += logprobs or []
        told: list[ResponseEvent] = []
        for event in events:
            match event:
                case ReasoningDelta(text):
                    if not isinstance(self._open, ReasoningItem):
                        told += self._begin(ReasoningItem(id=new_id("rs"), status="in_progress", content=[]))
                    told.append(self._grow("response.reasoning_text.delta", text, content_index=0))
                case ContentDelta(text):
                    if not isinstance(self._open, OutputMessage):
                        told += self._begin(OutputMessage(id=new_id("msg"), status="in_progress", content=[]))
                    new_logprobs = self._take_logprobs()
                    told.append(self._grow("response.output_text.delta", text, content_index=0, logprobs=new_logprobs))
                case ToolCallStart(_, call_id, name):
                    told += self._begin(self._call_item(call_id, name))
                case ToolCallArgumentsDelta(_, text):
                    told += self._grow_call(text)
                case ToolCallEnd(_, status):
                    told += self._end("completed" if status == "complete" else "incomplete")
        return told

    def finish(self, status: ItemStatus) -> list[ResponseEvent]:
        """Ends the item that is open. An answer without any gets an empty message."""
        told = []
        if not self.items:
            told += self._begin(OutputMessage(id=new_id("msg"), status="in_progress", content=[]))
        return told + self._end(status)

    def _call_item(self, call_id: str, name: str) -> FunctionCallItem | CustomToolCallItem:
        tool = self._tools.get(name)
        known: dict[str, Any] = {"call_id": call_id, "name": name, "status": "in_progress"}
        if tool is not None:
            known |= {"name": tool.name, "namespace": tool.namespace}
            if tool.custom is not None:
                return CustomToolCallItem(id=new_id("ctc"), input="", **known)
        return FunctionCallItem(id=new_id("fc"), arguments="", **known)

    def _begin(self, item: OutputItem) -> list[ResponseEvent]:
        told = self._end("completed")
        self._open = item
        told.append(("response.output_item.added", {"output_index": len(self.items), "item": item.model_copy()}))
        self.items.append(item)
        self._text, self._logprobs = "", []
        if not isinstance(item, FunctionCallItem | CustomToolCallItem):
            told.append(("response.content_part.added", {**self._place(), "content_index": 0, "part": self._part()}))
        return told

    def _grow_call(self, text: str) -> list[ResponseEvent]:
        if isinstance(self._open, CustomToolCallItem):
            self._text += text  # JSON, which is decoded as a whole
            return []
        return [self._grow("response.function_call_arguments.delta", text)]

    def _grow(self, kind: str, text: str, **fields: Any) -> ResponseEvent:
        self._text += text
        return kind, {**self._place(), **fields, "delta": text}

    def _end(self, status: ItemStatus) -> list[ResponseEvent]:
        item, place = self._open, self._place()
        if item is None:
            return []
        if isinstance(item, FunctionCallItem):
            item.arguments = self._text
            told = [("response.function_call_arguments.done", {**place, "name": item.name, "arguments": self._text})]
        elif isinstance(item, CustomToolCallItem):
            item.input = custom_input(self._text)
            told = [("response.custom_tool_call_input.delta", {**place, "delta": item.input})] if item.input else []
            told.append(("response.custom_tool_call_input.done", {**place, "input": item.input}))
        else:
            self._take_logprobs()
            place["content_index"] = 0
            part: ReasoningText | OutputText
            if isinstance(item, ReasoningItem):
                part = ReasoningText(text=self._text)
                item.content = [part]
                told = [("response.reasoning_text.done", {**place, "text": self._text})]
            else:
                part = OutputText(text=self._text, logprobs=self._logprobs)
                item.content = [part]
                told = [("response.output_text.done", {**place, "text": self._text, "logprobs": self._logprobs})]
            told.append(("response.content_part.done", {**place, "part": part}))
        item.status = status
        self._open = None
        return [*told, ("response.output_item.done", {"output_index": place["output_index"], "item": item})]

    def _take_logprobs(self) -> list[ChatPositionLogprobs]:
        taken, self._waiting_logprobs = self._waiting_logprobs, []
        self._logprobs += taken
        return taken

    def _part(self) -> ReasoningText | OutputText:
        if isinstance(self._open, ReasoningItem):
            return ReasoningText(text=self._text)
        return OutputText(text=self._text, logprobs=self._logprobs)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._open.id if self._open else None, "output_index": len(self.items) - 1}
