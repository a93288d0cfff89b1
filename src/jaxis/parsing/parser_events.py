"""Events of the parsers: parts of the reasoning, of the content and of tool calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

# The text of a malformed call becomes content. An unfinished call was cut off by the end of the text.
ToolCallStatus = Literal["complete", "unfinished", "malformed"]


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the reasoning that comes before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """Beginning of a call. `index` is 0 for the answer's first; `id` identifies the call in the tool's answer."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArgumentsDelta:
    """More of a call's arguments. The deltas of a complete call add up to one JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """End of a call, or of the text inside it."""

    index: int
    status: ToolCallStatus


ToolCallEvent = ToolCallStart | ToolCallArgumentsDelta | ToolCallEnd
Event = ContentDelta | ReasoningDelta | ToolCallEvent


@dataclass
class ToolCall:
    """A call with all of its arguments; those of an unfinished call are truncated JSON."""

    id: str
    name: str
    arguments: str = ""
    status: ToolCallStatus = "unfinished"


@dataclass
class ParsedOutput:
    """The parsed parts of a model's whole output; calls are complete, but one at the end may be unfinished."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)


def collect(events: Iterable[Event]) -> ParsedOutput:
    """Adds up all events of one answer."""
    output = ParsedOutput()
    calls: dict[int, ToolCall] = {}
    for event in events:
        match event:
            case ContentDelta(text):
                output.content += text
            case ReasoningDelta(text):
                output.reasoning += text
            case ToolCallStart(index, call_id, name):
                calls[index] = ToolCall(call_id, name)
            case ToolCallArgumentsDelta(index, text):
                calls[index].arguments += text
            case ToolCallEnd(index, status):
                calls[index].status = status
    output.tool_calls = [call for call in calls.values() if call.status != "malformed"]
    return output


def without_malformed_calls(events: Sequence[Event]) -> list[Event]:
    """The events of a whole answer, without those of malformed calls, whose text is there as content."""
    malformed = {event.index for event in events if isinstance(event, ToolCallEnd) and event.status == "malformed"}
    return [event for event in events if not (isinstance(event, ToolCallEvent) and event.index in malformed)]


def merge_deltas(events: Iterable[Event]) -> list[Event]:
    """The events, with neighbouring deltas of one kind merged."""
    merged: list[Event] = []
    for event in events:
        last = merged[-1] if merged else None
        match last, event:
            case (ContentDelta(a), ContentDelta(b)) | (ReasoningDelta(a), ReasoningDelta(b)):
                merged[-1] = type(event)(a + b)
            case ToolCallArgumentsDelta(i, a), ToolCallArgumentsDelta(j, b) if i == j:
                merged[-1] = ToolCallArgumentsDelta(i, a + b)
            case _:
                merged.append(event)
    return merged
