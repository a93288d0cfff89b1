"""The content blocks of a message, as the events that stream them and as the whole that these add up to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic_core import from_json

from jaxis.parsing.parser_events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)
from jaxis.server.endpoints.message_turns import tool_use_id
from jaxis.server.protocol.messages_answer import AnswerMessage

# An event's data; its `type` is also the event's name.
MessageEvent = dict[str, Any]


def sse_text(event: Mapping[str, Any]) -> str:
    """An event as it is sent."""
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"


@dataclass
class _Call:
    """A call whose end is not known yet."""

    id: str
    name: str
    arguments: str = ""


class MessageOutput:
    """Makes a parser's events into blocks that come one after the other: 0, 1, 2, ...

    A call is held back until its end is known: text that only began like a call becomes text, and no client runs a
    call with a part of its arguments. White space next to calls and reasoning is left out.

    Attributes:
      num_calls: Calls so far.
      is_cut: The text ended inside a call.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self.is_cut = False
        self._num_blocks = 0
        self._open: Literal["text", "thinking"] | None = None
        self._after_thinking = False
        self._space = ""  # that a text block would begin with
        self._thinking_digest = hashlib.sha256()
        self._calls: dict[int, _Call] = {}

    def add(self, events: Iterable[Event]) -> list[MessageEvent]:
        """Takes a step's events; returns those of the blocks."""
        told: list[MessageEvent] = []
        for event in events:
            match event:
                case ReasoningDelta(text):
                    told += self._think(text)
                case ContentDelta(text):
                    told += self._write(text)
                case ToolCallStart(index, call_id, name):
                    self._calls[index] = _Call(call_id, name)
                case ToolCallArgumentsDelta(index, text):
                    self._calls[index].arguments += text
                case ToolCallEnd(index, status):
                    call = self._calls.pop(index)
                    self.is_cut |= status == "unfinished"
                    told += [] if status == "malformed" else self._call(call)
        return told

    def finish(self) -> list[MessageEvent]:
        """Ends the block that is open. An answer without any gets one of text."""
        if self._num_blocks:
            return self._end()
        space = self._space
        told = self._begin("text", {"type": "text", "text": ""})
        return [*told, *([self._delta("text_delta", text=space)] if space else []), *self._end()]

    def _think(self, text: str) -> list[MessageEvent]:
        told: list[MessageEvent] = []
        if self._open != "thinking":
            told = self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            self._thinking_digest = hashlib.sha256()
        self._thinking_digest.update(text.encode("utf-8", "surrogatepass"))
        return [*told, self._delta("thinking_delta", thinking=text)]

    def _write(self, text: str) -> list[MessageEvent]:
        if self._open == "text":
            return [self._delta("text_delta", text=text)]
        self._space += text
        if not self._space.strip():
            return []
        # Templates put empty lines between reasoning and text.
        text = self._space.lstrip("\r\n") if self._after_thinking else self._space
        return [*self._begin("text", {"type": "text", "text": ""}), self._delta("text_delta", text=text)]

    def _call(self, call: _Call) -> list[MessageEvent]:
        self.num_calls += 1
        block = {"type": "tool_use", "id": tool_use_id(call.id), "name": call.name, "input": {}}
        told = self._begin(None, block)
        if call.arguments:
            told.append(self._delta("input_json_delta", partial_json=call.arguments))
        return [*told, self._stop()]

    def _begin(self, kind: Literal["text", "thinking"] | None, block: dict[str, Any]) -> list[MessageEvent]:
        told = self._end()
        self._open, self._space, self._after_thinking = kind, "", kind == "thinking"
        self._num_blocks += 1
        return [*told, {"type": "content_block_start", "index": self._num_blocks - 1, "content_block": block}]

    def _delta(self, kind: str, **fields: str) -> MessageEvent:
        return {"type": "content_block_delta", "index": self._num_blocks - 1, "delta": {"type": kind, **fields}}

    def _end(self) -> list[MessageEvent]:
        if self._open is None:
            return []
        signed = [self._delta("signature_delta", signature=self._thinking_digest.hexdigest())]
        told = [*(signed if self._open == "thinking" else []), self._stop()]
        self._open = None
        return told

    def _stop(self) -> MessageEvent:
        return {"type": "content_block_stop", "index": self._num_blocks - 1}


def fold(events: Iterable[MessageEvent]) -> AnswerMessage:
    """The message that all of its events add up to, as clients add them up."""
    message: dict[str, Any] = {}
    blocks: list[dict[str, Any]] = []
    inputs: dict[int, str] = {}
    for event in events:
        match event:
            case {"type": "message_start", "message": begun}:
                message = {**begun, "content": blocks}
            case {"type": "content_block_start", "content_block": block}:
                blocks.append(dict(block))
            case {"type": "content_block_delta", "index": index, "delta": {"partial_json": text}}:
                inputs[index] = inputs.get(index, "") + text
            case {"type": "content_block_delta", "index": index, "delta": delta}:
                for name in delta.keys() - {"type"}:
                    blocks[index][name] += delta[name]
            case {"type": "message_delta", "delta": delta, "usage": usage}:
                message |= {**delta, "usage": usage}
    for index, text in inputs.items():
        blocks[index]["input"] = from_json(text, allow_partial=True)
    return AnswerMessage(**message)
