from __future__ import annotations

from jaxis.parsing.harmony import MESSAGE, read_first_recipient, read_header
from jaxis.parsing.reasoning_parsers.base import ReasoningMarks, ReasoningParser
from jaxis.parsing.text_reader import Reading
from jaxis.parsing.tool_parsers.invocations import MUSE_ENDS, MUSE_NO_TOOLS

_START = "<|start|>"


class MuseGlimmerReasoningParser(ReasoningParser):
    """Muse Glimmer: reasoning is in messages to itself. Headers are removed, except of messages to tools."""

    needs_special_tokens = True
    closings = ("<|start|>assistant to=user<|message|>",)

    @classmethod
    def marks(cls, prompt: str) -> ReasoningMarks | None:
        opening = f"to=self{MESSAGE}"
        return ReasoningMarks(
            opened=prompt.rstrip().endswith(opening),
            openings=(opening,),
            ends=(MUSE_ENDS[0],),
            closings=(*MUSE_ENDS, _START),
            repeats=True,
            refused=("to=", "self"),
        )

    def _read(self) -> Reading[None]:
        if opener := (yield from read_first_recipient(self._reader)):
            yield from self._read_message(opener)
        while (marker := (yield from self._reader.until((_START, *MUSE_ENDS), self._add_content))) is not None:
            if marker == _START:
                yield from self._read_message(marker)

    def _read_message(self, opener: str) -> Reading[None]:
        header = yield from read_header(self._reader, opener, MUSE_ENDS)
        if not header.complete:
            self._add_content(header.text)
            return
        take = self._add_content
        if header.function == "self":
            self._space = "\n" if self._reasoned else ""
            take = self._add_reasoning
        is_call = header.function not in MUSE_NO_TOOLS
        if is_call:
            # The tool parser knows a header by its beginning, which the prompt has of the first one.
            self._add_content(
                header.text if header.text.startswith(_START) else f"{_START}assistant {header.text.strip()}"
            )
        marker = yield from self._reader.until((_START, *MUSE_ENDS), take)
        if marker == _START:
            self._reader.unread(marker)
        elif is_call and marker is not None:
            self._add_content(marker)
