from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from jaxis.parsing.json_schema import property_schema
from jaxis.parsing.text_reader import EndOfTextError, Reading
from jaxis.parsing.tool_parsers.base import ToolParser
from jaxis.parsing.tool_parsers.json_value import MalformedCallError
from jaxis.parsing.tool_parsers.tools import FUNCTION_NAME, FunctionTool


class TaggedValueParser(ToolParser):
    """Finds the end of a value in formats without escapes, which is a choice among tags: what follows one tells.

    - A closing tag ends the value if another argument, the end of the call, another call or the end of the text
      follows. Otherwise it is part of the value.
    - Arguments do not nest. Where a closing tag is missing, the value ends at the next argument that the function has,
      if that one is closed as arguments are; or at the end of the call, if nothing but another call follows it.
    - A call that the value quotes as a whole is part of it.

    Attributes:
      argument_tags: (Before, after) an argument's name.
      call_tags: (Before, after) a function's name.
      value_end: The tag that closes a value.
      call_end: The tag that closes a call.
      section_tags: Tags around a call, or around several.
    """

    argument_tags: ClassVar[tuple[str, str]]
    value_end: ClassVar[str]
    call_tags: ClassVar[tuple[str, str]]
    call_end: ClassVar[str]
    section_tags: ClassVar[tuple[str, ...]] = ()

    def __init__(self, tools: Sequence[FunctionTool] = ()) -> None:
        super().__init__(tools)
        self._name = ""
        self._given: list[str] = []  # names of the arguments that have begun
        self._in_section = True  # the call's end is not the last tag
        self._quoted: list[str] = []  # tags that close what the value quotes
        self._num_nested = 0  # arguments that it quotes
        self._quote_is_certain = False
        self._quotes_hold = True  # until a call in a value turns out to be no quote
        self._closings = (self.call_end, *self.section_tags[1:])

    def _read_arguments(self) -> Reading[None]:
        """Reads the arguments of a call, and the tag that closes the call if it comes."""
        while True:
            if not (yield from self._reader.skip_space()):
                raise EndOfTextError
            if (yield from self._reader.take_if(self.call_end)):
                return
            if not (yield from self._reader.take_if(self.argument_tags[0])):
                if not (yield from self._reader.ahead(self._is_over())):
                    raise MalformedCallError
                return
            if (key := (yield from self._read_argument_name())) is None:
                raise MalformedCallError
            yield from self._read_value(key)

    def _read_value(self, key: str) -> Reading[None]:
        raise NotImplementedError

    def _begin(self, name: str) -> Reading[None]:
        """Starts a call if the text after its name belongs to a call."""
        self._name, self._given = name, []
        if not (yield from self._looks(self._is_begun(), at_end=True)):
            raise MalformedCallError
        self._start_call(name)

    def _read_argument_name(self) -> Reading[str | None]:
        """Reads an argument's name up to its value; None if there is no argument."""
        pieces: list[str] = []
        begin, end = self.argument_tags
        marker = yield from self._reader.until((end, "\n", begin, self.value_end, *self._closings), pieces.append)
        if marker is None:
            raise EndOfTextError
        return "".join(pieces).strip() or None if marker == end else None

    def _read_value_text(
        self, take: Callable[[str], None], in_string: Callable[[], bool] = lambda: False
    ) -> Reading[None]:
        """Passes on a value as it comes, up to its end, and takes the tag that closes it.

        `in_string` returns whether the text so far ends inside a string in JSON. Raises EndOfTextError if the text ends
        inside the value.
        """
        self._quoted, self._num_nested, self._quote_is_certain = [], 0, False
        openings = (self.argument_tags[0], self.call_tags[0], *self.section_tags[:1])
        markers = (*openings, self.value_end, *self._closings)
        while (marker := (yield from self._reader.until(markers, take))) is not None:
            self._reader.unread(marker)
            ends = yield from self._ends_value(marker)
            if ends and in_string() and (yield from self._looks(self._read_string_end(lambda _: None), at_end=False)):
                yield from self._read_string_end(take)
                continue
            if not ends or marker == self.value_end:
                self._reader.skip(len(marker))
            if ends:
                return
            take(marker)
        raise EndOfTextError

    def _read_string_end(self, take: Callable[[str], None]) -> Reading[bool]:
        """Reads the rest of a JSON string; False if it has a line break, or no valid end."""
        while (marker := (yield from self._reader.until(('"', "\\", "\n"), take))) not in ('"', "\n"):
            if marker is None:
                raise EndOfTextError
            take(marker)
            yield from self._reader.peek()
            take(self._reader.skip(1))
        take(marker)
        return marker == '"' and (yield from self._reader.skip_space()) in (",", ":", "]", "}")

    def _ends_value(self, marker: str) -> Reading[bool]:
        """Returns whether the value ends at the tag that comes next; otherwise records what the tag opens or closes."""
        if marker == self.value_end:
            return (yield from self._is_closed())
        if marker in self._closings:
            return (yield from self._call_is_closed(marker))
        if marker == self.argument_tags[0]:
            in_quote = self.call_end in self._quoted
            ends = not in_quote and (yield from self._looks(self._is_next_argument(), at_end=True))
            self._num_nested += not ends
            return ends
        if (yield from self._looks(self._call_begins(), at_end=False)):
            self._quoted.append(self.call_end if marker == self.call_tags[0] else self.section_tags[1])
        return False

    def _is_closed(self) -> Reading[bool]:
        """Returns whether the closing tag of a value that comes next is the value's own."""
        if not (yield from self._looks(self._closes_value(), at_end=True)):
            self._num_nested = max(self._num_nested - 1, 0)
            return False
        if self.call_end not in self._quoted or not self._quotes_hold:
            return True
        if not self._quote_is_certain:
            self._quote_is_certain = self._quotes_hold = yield from self._looks(self._quote_goes_on(), at_end=True)
        return not self._quote_is_certain

    def _call_is_closed(self, marker: str) -> Reading[bool]:
        """Returns whether the next closing tag of a call or section is that of the call being read."""
        if marker not in self._quoted:
            return (yield from self._looks(self._closes_call(), at_end=False))
        while self._quoted.pop() != marker:
            pass
        self._quote_is_certain = self._quote_is_certain and self.call_end in self._quoted
        return False

    # Looking ahead.

    def _looks(self, reading: Reading[bool], *, at_end: bool) -> Reading[bool]:
        """Returns the result of a reading without taking text; `at_end` if the text ends before there is one."""
        try:
            return (yield from self._reader.ahead(reading))
        except EndOfTextError:
            return at_end

    def _is_begun(self) -> Reading[bool]:
        if not (yield from self._reader.skip_space()):
            raise EndOfTextError
        return (yield from self._reader.take_if(self.argument_tags[0])) or (yield from self._take_closing())

    def _is_over(self) -> Reading[bool]:
        return (yield from self._take_closing()) or (bool(self._given) and (yield from self._offered_call_begins()))

    def _take_closing(self) -> Reading[bool]:
        """Takes a tag that closes a call or a section, or a token that ends the turn, if one comes next."""
        for literal in (*self._closings, *self.dropped):
            if (yield from self._reader.take_if(literal)):
                return True
        return False

    def _closes_value(self, argument: str | None = None) -> Reading[bool]:
        """Takes a closing tag; returns whether the text after it shows that it closes this argument's value."""
        yield from self._reader.take_if(self.value_end)
        if not (yield from self._reader.skip_space()):
            return True
        if (yield from self._reader.take_if(self.argument_tags[0])):
            key = yield from self._read_argument_name()
            return key not in (None, argument) and (not self._num_nested or self._is_expected(key))
        return (yield from self._take_closing()) or (yield from self._offered_call_begins())

    def _is_next_argument(self) -> Reading[bool]:
        """Returns whether an argument begins whose predecessor was not closed."""
        key: str | None = None
        while True:
            marker = yield from self._reader.until(
                (self.argument_tags[0], self.value_end, *self._closings), lambda _: None
            )
            if marker is None:
                return True
            if marker == self.argument_tags[0]:
                name = yield from self._read_argument_name()
                is_expected = name != key and self._is_expected(name)
                if is_expected != (key is None):
                    return is_expected
                key = key or name
                continue
            self._reader.unread(marker)
            if marker == self.value_end:
                return (yield from self._closes_value(key))
            if (yield from self._closes_call()):
                return True

    def _closes_call(self) -> Reading[bool]:
        """Takes a closing tag of a call or section; returns whether the text after it shows that it closes one."""
        is_complete = not self._in_section
        while (yield from self._reader.skip_space()):
            is_complete = is_complete or not (yield from self._reader.comes(self.call_end))
            if not (yield from self._take_closing()):
                return (yield from self._offered_call_begins())
        return is_complete

    def _quote_goes_on(self) -> Reading[bool]:
        """Returns whether more than calls follows the call in which a value would end: the value quotes that call."""
        depth = self._quoted.count(self.call_end)
        while marker := (yield from self._reader.until((self.call_tags[0], self.call_end), lambda _: None)):
            self._reader.unread(marker)
            if marker == self.call_tags[0]:
                depth += yield from self._call_begins()
                continue
            self._reader.skip(len(marker))
            depth -= 1
            while depth == 0 and (yield from self._take_closing_after_space()):
                pass
            if depth == 0:
                if not (yield from self._reader.peek()):
                    return False
                if not (yield from self._call_begins()):
                    return True
                depth = 1
        return True

    def _take_closing_after_space(self) -> Reading[bool]:
        return bool((yield from self._reader.skip_space())) and (yield from self._take_closing())

    def _offered_call_begins(self) -> Reading[bool]:
        return (yield from self._call_begins(offered=True))

    def _call_begins(self, *, offered: bool = False) -> Reading[bool]:
        """Takes the beginning of a call; returns whether one begins, with `offered` of an offered function."""
        if self.section_tags and (yield from self._reader.take_if(self.section_tags[0])):
            yield from self._reader.skip_space()
        if not (yield from self._reader.take_if(self.call_tags[0])):
            return False
        yield from self._reader.skip_space()
        name = yield from self._reader.take_while(lambda text: FUNCTION_NAME.fullmatch(text) is not None)
        if not (yield from self._reader.skip_space()):
            raise EndOfTextError
        if not name or (offered and self._tools and name not in self._tools):
            return False
        if not (yield from self._reader.take_if(self.call_tags[1])):
            return False
        if not (yield from self._reader.skip_space()):
            raise EndOfTextError
        begins = yield from self._reader.take_if(self.argument_tags[0])
        return begins or (yield from self._reader.take_if(self.call_end))

    def _is_expected(self, key: str | None) -> bool:
        """Returns whether the function has this argument, and the call does not have it yet."""
        if key is None or key in self._given:
            return False
        tool = self._tools.get(self._name)
        return tool is None or property_schema(tool.parameters, key, tool.parameters) is not None
