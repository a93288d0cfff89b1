"""Granite 3: the reasoning after a phrase (3.1, 3.2) or between tags (3.3)."""

from __future__ import annotations

from jaxis.parsing.reasoning_parsers.think import ThinkReasoningParser
from jaxis.parsing.text_reader import Reading
from jaxis.parsing.tool_parsers.granite import GraniteToolParser

_OPENINGS = ("<think>", "Here is my thought process:", "Here's my thought process:")
_ANSWER, _ANSWER_END = "<response>", "</response>"


class GraniteReasoningParser(ThinkReasoningParser):
    """Granite 3.1 to 3.3: `Here is my thought process: ... Here is my response: ...`, or
    `<think>...</think><response>...</response>`.

    Nothing here is a special token. `</response>` is removed at the end of an answer that `<response>` opened, and
    before a call.
    """

    opening = "<think>"
    closings = ("</think>", "Here is my response:", "Here's my response:")

    def _take_opening(self) -> Reading[bool]:
        for opening in _OPENINGS:
            if (yield from self._reader.comes(opening)):
                self._reader.skip(len(opening))
                return True
        return False

    def _read_answer(self) -> Reading[None]:
        if not (yield from self._reader.comes(_ANSWER)):
            yield from super()._read_answer()
            return
        self._reader.skip(len(_ANSWER))
        yield from self._reader.skip_space()
        held = ""  # the closing tag and white space after it: content if more text comes

        def take(text: str) -> None:
            nonlocal held
            if held and not text.strip():
                held += text
            else:
                self._add_content(held + text)
                held = ""

        markers = (_ANSWER_END, *GraniteToolParser.openers, *self._tool_dropped)
        while (marker := (yield from self._reader.until(markers, take))) is not None:
            if marker == _ANSWER_END:
                self._add_content(held)
                held = marker
            elif marker in GraniteToolParser.openers:
                self._add_content(held.removeprefix(_ANSWER_END) + marker)
                held = ""
