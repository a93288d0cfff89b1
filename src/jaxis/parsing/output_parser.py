from __future__ import annotations

from collections.abc import Iterable, Sequence

from jaxis.parsing.parser_events import ContentDelta, Event, ParsedOutput, collect, merge_deltas
from jaxis.parsing.reasoning_parsers.base import ReasoningParser
from jaxis.parsing.tool_parsers.base import ToolParser
from jaxis.parsing.tool_parsers.tools import FunctionTool


class OutputParser:
    """Splits one answer's text into reasoning, content and tool calls: a reasoning parser, then a tool parser.

    Without a parser, calls or reasoning stay in the content. The text must have its special tokens if either parser
    needs them. `prompt` is the rendered one.
    """

    def __init__(
        self,
        tool_parser: type[ToolParser] | None,
        reasoning_parser: type[ReasoningParser] | None,
        *,
        tools: Sequence[FunctionTool] = (),
        prompt: str = "",
    ) -> None:
        self._tools = tool_parser(tools) if tool_parser else None
        tool_dropped = tool_parser.dropped if tool_parser else ()
        self._reasoning = reasoning_parser(prompt, tool_dropped) if reasoning_parser else None

    def feed(self, delta_text: str) -> list[Event]:
        """Takes the next part of the text, which may be cut anywhere; returns the events that are now certain."""
        if self._reasoning is None:
            return self._parse_calls([ContentDelta(delta_text)])
        return self._parse_calls(self._reasoning.feed(delta_text))

    def finish(self) -> list[Event]:
        """Ends the text, and returns the events that were held back."""
        events = self._parse_calls(self._reasoning.finish()) if self._reasoning else []
        return merge_deltas([*events, *(self._tools.finish() if self._tools else ())])

    def _parse_calls(self, events: Iterable[Event]) -> list[Event]:
        if self._tools is None:
            return [event for event in events if not isinstance(event, ContentDelta) or event.text]
        parsed: list[Event] = []
        for event in events:
            parsed += self._tools.feed(event.text) if isinstance(event, ContentDelta) else [event]
        return merge_deltas(parsed)


def parse_output(parser: OutputParser, text: str) -> ParsedOutput:
    return collect([*parser.feed(text), *parser.finish()])
