"""The items of a response, and the events that stream them."""

from __future__ import annotations

from collections.abc import Iterable
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
    FunctionCallItem,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
)

# An event's type and its fields.
ResponseEvent = tuple[str, dict[str, Any]]


class ResponseOutput:
    """Builds a response's items one after the other: each stretch of reasoning or text, and each call, is one.

    Attributes:
      items: The items so far.
    """

    def __init__(self) -> None:
        self.items: list[OutputItem] = []
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
                    item = FunctionCallItem(
                        id=new_id("fc"), call_id=call_id, name=name, arguments="", status="in_progress"
                    )
                    told += self._begin(item)
                case ToolCallArgumentsDelta(_, text):
                    told.append(self._grow("response.function_call_arguments.delta", text))
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

    def _begin(self, item: OutputItem) -> list[ResponseEvent]:
        told = self._end("completed")
        self._open = item
        told.append(("response.output_item.added", {"output_index": len(self.items), "item": item.model_copy()}))
        self.items.append(item)
        self._text, self._logprobs = "", []
        if not isinstance(item, FunctionCallItem):
            told.append(("response.content_part.added", {**self._place(), "content_index": 0, "part": self._part()}))
        return told

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
