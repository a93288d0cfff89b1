from __future__ import annotations

from typing import ClassVar

from jaxis.parsing.reasoning_parsers.answer_tags import AnswerTagsReasoningParser
from jaxis.parsing.text_reader import Reading
from jaxis.parsing.tool_parsers.granite import GraniteToolParser


class GraniteReasoningParser(AnswerTagsReasoningParser):
    """Granite 3.1, 3.2: `Here is my thought process: ... Here is my response: ...`; 3.3: tags, not special tokens."""

    opening = "<think>"
    closings = ("</think>", "Here is my response:", "Here's my response:")
    more_openings: ClassVar[dict[str, str]] = {
        "Here is my thought process:": "Here is my response:",
        "Here's my thought process:": "Here's my response:",
    }
    answer_tags = ("<response>", "</response>")
    call_openers = GraniteToolParser.openers

    def _take_opening(self) -> Reading[bool]:
        for opening in (self.opening, *self.more_openings):
            if (yield from self._reader.comes(opening)):
                self._reader.skip(len(opening))
                return True
        return False
