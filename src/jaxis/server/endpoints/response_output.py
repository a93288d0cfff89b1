"""The items of a response, and the events that stream them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jaxis.parsing.parser_events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)
from jaxis.server.protocol.base import new_id
from jaxis.server.protocol.chat import ChatPositionLogprobs
from jaxis.server.protocol.response_items import (
    CustomToolCallItem,
    FunctionCallItem,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
)
from jaxis.server.protocol.response_tools import OfferedTool, custom_input

# An event's type and its fields.
ResponseEvent = tuple[str, dict[str, Any]]


class ResponseOutput:
    """Builds a response's items one after the other: each stretch of reasoning or text, and each call, is one.

    Attributes:
      items: The items so far.

    Args:
      tools: What the functions that the model sees stand for, by their names.
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
                    if status == "malformed":  # its text follows again, as content
                        del self.items[-1]
        return told

    def finish(self, status: ItemStatus) -> list[ResponseEvent]:
        """Ends the item that is open. An answer without any gets an empty message."""
        told = []
        if not self.items:
            told += self._begin(OutputMessage(id=new_id("msg"), status="in_progress", content=[]))
        return told + self._end(status)

    def _call_item(self, call_id: str, name: str) -> FunctionCallItem | CustomToolCallItem:
        tool = self._tools.get(name, OfferedTool(name))
        if tool.custom is not None:
            return CustomToolCallItem(
                id=new_id("ctc"),
                call_id=call_id,
                name=tool.name,
                namespace=tool.namespace,
                input="",
                status="in_progress",
            )
        return FunctionCallItem(
            id=new_id("fc"),
            call_id=call_id,
            name=tool.name,
            namespace=tool.namespace,
            arguments="",
            status="in_progress",
        )

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
