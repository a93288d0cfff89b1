from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from jaxis.parsing.call_ids import new_call_id
from jaxis.parsing.parser_events import (
    ContentDelta,
    Event,
    ToolCallArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
    ToolCallStatus,
    merge_deltas,
)
from jaxis.parsing.text_reader import EndOfTextError, Reading, TextReader
from jaxis.parsing.tool_parsers.call_grammar import CallGrammar, UnwritableCallError
from jaxis.parsing.tool_parsers.json_value import MalformedCallError
from jaxis.parsing.tool_parsers.tools import FUNCTION_NAME, FunctionTool

# A long text is read in pieces: going back then copies one piece rather than all the remaining text.
_PIECE_LENGTH = 4096


class ToolParser(ABC):
    """Finds the calls in one answer's text. One parser serves one answer.

    A parser names the markers that may open a call, and reads a call once its marker is found. All other text is
    content, without the white space that separates calls. Text that turns out not to be a call is content, verbatim.

    Attributes:
      needs_special_tokens: The format's markers are special tokens: the text must be decoded with
        `skip_special_tokens=False`. The parser takes them out.
      openers: Markers that open a call.
      dropped: Markers without meaning here, such as those that end a turn.
      call_markers: Markers with which a turn begins if, and only if, it has calls.
      call_opening: Text that the model writes before a call, or before all of them; see `write_calls`.
      call_separator: Text between calls that have an opening each.
      suffixed: Attributes with tags that end as the tokenizer's do, such as `<tool_call:opensource>`.
      writes_reasoning: True if `write_answer` begins with the model's reasoning, which only it can tell from calls.
    """

    needs_special_tokens: ClassVar[bool] = False
    openers: ClassVar[tuple[str, ...]] = ()
    dropped: ClassVar[tuple[str, ...]] = ()
    call_markers: ClassVar[tuple[str, ...]] = ()
    call_opening: ClassVar[str] = ""
    call_separator: ClassVar[str] = ""
    suffixed: ClassVar[tuple[str, ...]] = ()
    writes_reasoning: ClassVar[bool] = False

    def __init__(self, tools: Sequence[FunctionTool] = ()) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._reader = TextReader()
        self._events: list[Event] = []
        self._space = ""  # white space held back: not content if a call comes next
        self._space_before_call = ""
        self._after_call = False
        self._num_calls = 0
        self._open_call: int | None = None
        self._arguments_done = False
        self._reading = self._read()

    def feed(self, delta_text: str) -> list[Event]:
        """Takes the next part of the text, which may be cut anywhere; returns the events that are now certain."""
        for begin in range(0, len(delta_text), _PIECE_LENGTH):
            self._reader.feed(delta_text[begin : begin + _PIECE_LENGTH])
            next(self._reading, None)
        return self._new_events()

    def finish(self) -> list[Event]:
        """Ends the text, and returns the events that were held back. The parser takes no more."""
        self._reader.close()
        next(self._reading, None)
        return self._new_events()

    @classmethod
    def opening_of(cls, _grammar: CallGrammar) -> str:
        """Returns `call_opening`, where it depends on the tokenizer."""
        return cls.call_opening

    @classmethod
    def write_calls(cls, _grammar: CallGrammar) -> str:
        """Returns the expression after `call_opening`: one call, or all of them if they share an opening.

        Raises UnwritableCallError if the format cannot express a function's schema.
        """
        raise UnwritableCallError("calls")

    @classmethod
    def write_answer(cls, grammar: CallGrammar, answer: str | None, *, must_call: bool) -> str:
        """Returns the expression of a whole answer, of calls only, or of another answer (None: text, then any calls).

        Raises UnwritableCallError if the format cannot express a function's schema.
        """
        opening, rest = cls.opening_of(grammar), grammar.rule(cls.write_calls(grammar))
        if must_call or answer is not None:
            call = grammar.rule(f"{grammar.text(opening)} {rest}")
            calls = grammar.repeated(call, grammar.text(cls.call_separator))
            return calls if must_call or answer is None else grammar.choice((answer, calls))
        # Wherever the parser would begin to read a call, one that fits must follow.
        beginnings = {opener: cls.write_call_after(opener, grammar) for opener in cls.openers}
        if not opening.startswith(cls.openers):
            beginnings[opening] = rest
        markers = [marker for marker in map(grammar.first_marker, beginnings) if marker]
        call = grammar.choice(
            grammar.rule(f"{grammar.free_text_up_to(beginning, markers)} {after}")
            for beginning, after in beginnings.items()
            if after is not None
        )
        return f"{call}{'*' if grammar.max_calls is None else '?'} {grammar.free_text(*markers)}"

    @classmethod
    def write_call_after(cls, opener: str, grammar: CallGrammar) -> str | None:
        """Returns the expression after an opener that comes after text; None if others must open its construct.

        Raises UnwritableCallError if the format cannot express a function's schema.
        """
        opening = cls.opening_of(grammar)
        if not opening.startswith(opener):
            return None
        return f"{grammar.text(opening.removeprefix(opener))} {grammar.rule(cls.write_calls(grammar))}"

    @abstractmethod
    def _read_call(self, opener: str) -> Reading[None]:
        """Reads the text after the opener, with `_start_call`, `_add_arguments` and `_end_call`.

        Raises MalformedCallError if the text is not a call, which becomes content, and EndOfTextError if it ends inside
        the call.
        """

    def _read(self) -> Reading[None]:
        markers = self.openers + self.dropped
        while (marker := (yield from self._reader.until(markers, self._add_content))) is not None:
            if marker in self.openers:
                yield from self._attempt(marker)
        self._end_content()

    def _attempt(self, opener: str) -> Reading[None]:
        self._reader.record(opener)
        try:
            yield from self._read_call(opener)
        except MalformedCallError:
            self._give_up("malformed")
        except EndOfTextError:
            self._give_up("unfinished")
        self._reader.recorded()

    def _give_up(self, status: ToolCallStatus) -> None:
        begun = self._open_call is not None
        if begun and self._arguments_done:
            status = "complete"  # only the closing marker is missing
        if begun:
            self._end_call(status)
        if status == "malformed":
            if begun:
                self._after_call = False
                self._space = self._space_before_call
            self._give_back(begun)
        elif not begun:
            self._add_content(self._reader.recorded())

    def _give_back(self, begun: bool) -> None:
        """Turns a malformed call into content.

        If only its opener was valid, the text after it is read again, since it may contain another opener. A call that
        had started is not read again: hostile text could have each part read once for every opener before it.
        """
        self._add_content(self._reader.recorded() if begun else self._reader.rewind())

    def _new_events(self) -> list[Event]:
        events, self._events = self._events, []
        return merge_deltas(events)

    def _add_content(self, text: str) -> None:
        if self._after_call:
            text = text.lstrip()
        text = self._space + text
        content = text.rstrip()
        self._space = text[len(content) :]
        if content:
            self._after_call = False
            self._events.append(ContentDelta(content))

    def _end_content(self) -> None:
        if self._space:
            self._events.append(ContentDelta(self._space))

    def _read_name(self) -> Reading[str]:
        """Reads a function's name, up to the first character that a name cannot have, and white space around it.

        Raises MalformedCallError if there is none, and EndOfTextError if the text ends in the name or right after it.
        """
        yield from self._reader.skip_space()
        name = yield from self._reader.take_while(lambda text: FUNCTION_NAME.fullmatch(text) is not None)
        if not (yield from self._reader.skip_space()):
            raise EndOfTextError
        if not name:
            raise MalformedCallError
        return name

    def _start_call(self, name: str, call_id: str | None = None) -> None:
        if not FUNCTION_NAME.fullmatch(name):
            raise MalformedCallError
        self._space_before_call, self._space = self._space, ""
        self._open_call = self._num_calls
        self._num_calls += 1
        self._events.append(ToolCallStart(self._open_call, call_id or self._new_id(), name))

    def _add_arguments(self, text: str) -> None:
        assert self._open_call is not None
        self._events.append(ToolCallArgumentsDelta(self._open_call, text))

    def _end_call(self, status: ToolCallStatus = "complete") -> None:
        assert self._open_call is not None
        self._events.append(ToolCallEnd(self._open_call, status))
        self._open_call = None
        self._arguments_done = False
        self._after_call = True
        if status != "malformed":
            self._reader.record()  # the text from here on is not part of the call

    def _new_id(self) -> str:
        return new_call_id()
