"""Splits a completion into content, reasoning and tool calls, whole or as it streams."""

from __future__ import annotations

from collections.abc import Iterable

from jaxis.engine.grammar.delayed_grammar import ReasoningTokens, ReasoningTracker
from jaxis.outputs import CompletionOutput
from jaxis.parsing.output_parser import OutputParser
from jaxis.parsing.parser_events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
    collect,
)
from jaxis.server.protocol.chat import AssistantMessage, ChatDelta
from jaxis.server.protocol.tools import ChatToolCall, ChatToolCallDelta, FunctionCall, FunctionCallDelta


class ChatOutput:
    """Reads one completion, once.

    Args:
      parser: Parses the model's formats; None leaves the text as it is.
      reasoning: How to recognize reasoning tokens, to count them; None counts none.
      include_reasoning: False leaves the reasoning out.
      parallel_tool_calls: False leaves out all calls but the first.
    """

    def __init__(
        self,
        parser: OutputParser | None,
        reasoning: ReasoningTokens | None = None,
        *,
        include_reasoning: bool = True,
        parallel_tool_calls: bool = True,
    ) -> None:
        self._parser = parser
        self._tracker = ReasoningTracker(reasoning) if reasoning else None
        self._token_ids: list[int] = []
        self._include_reasoning = include_reasoning
        self._parallel_tool_calls = parallel_tool_calls
        self._num_calls = 0

    def read(self, completion: CompletionOutput) -> list[Event]:
        """The events of the next part of a completion; `completion.text` holds only text that was not read yet."""
        if self._parser is None:
            return [ContentDelta(completion.text)] if completion.text else []
        if self._tracker is not None:
            self._token_ids += completion.token_ids
            self._tracker.follow(self._token_ids)
        events = self._parser.feed(completion.text)
        if completion.finished:
            events += self._parser.finish()
        events = [event for event in events if self._is_wanted(event)]
        for event in events:
            if isinstance(event, ToolCallStart):
                self._num_calls += 1
            elif isinstance(event, ToolCallEnd) and event.status == "malformed":
                self._num_calls -= 1
        return events

    @property
    def num_reasoning_tokens(self) -> int:
        """How many of the tokens so far are reasoning."""
        return self._tracker.num_tokens if self._tracker else 0

    def finish_reason(self, completion: CompletionOutput) -> str | None:
        """OpenAI's name for how the completion ended, if it did; call it after `read`."""
        return "tool_calls" if completion.finish_reason == "stop" and self._num_calls else completion.finish_reason

    def _is_wanted(self, event: Event) -> bool:
        if isinstance(event, ReasoningDelta):
            return self._include_reasoning
        if isinstance(event, ToolCallStart | ToolCallArgumentsDelta | ToolCallEnd):
            return self._parallel_tool_calls or event.index == 0
        return True


def message_of(events: Iterable[Event], prefix: str = "") -> AssistantMessage:
    """The whole message; `prefix` comes before its content."""
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


def plain_text(events: Iterable[Event]) -> str | None:
    """The text of events that add nothing but content; None of others."""
    texts = [event.text if isinstance(event, ContentDelta) else None for event in events]
    return None if None in texts else "".join(text for text in texts if text is not None)


def delta_of(events: Iterable[Event]) -> ChatDelta:
    """A chunk's addition to a message."""
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
