"""Turns the events of an answer into what Ollama's lines add to it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field

from jaxis.parsing.parser_events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)
from jaxis.server.protocol.ollama import OllamaFunctionCall, OllamaToolCall


@dataclass
class AnswerPart:
    """A part of an answer: what a line adds, or all of it.

    Attributes:
      content: Its text.
      thinking: Its reasoning.
      tool_calls: Calls that are complete.
    """

    content: str = ""
    thinking: str = ""
    tool_calls: list[OllamaToolCall] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.thinking or self.tool_calls)

    def add(self, part: AnswerPart) -> None:
        """Adds the part that comes next."""
        self.content += part.content
        self.thinking += part.thinking
        self.tool_calls += part.tool_calls


class OllamaOutput:
    """Reads the events of one answer.

    Arguments are objects here, so a call is known only when it has ended. One that the end of the answer cut off is
    left out: the reason of the end tells of it.
    """

    def __init__(self) -> None:
        self._open: OllamaToolCall | None = None
        self._arguments = ""
        self._num_calls = 0

    def add(self, events: Iterable[Event]) -> list[AnswerPart]:
        """The parts that a step's events make: neighbouring text and reasoning is one, and each call is one."""
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
