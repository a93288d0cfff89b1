from __future__ import annotations

from jaxis.parsing.harmony import ENDS, MESSAGE, OPENERS, read_first_recipient, read_header
from jaxis.parsing.reasoning_parsers.base import ReasoningMarks, ReasoningParser
from jaxis.parsing.text_reader import Reading


class HarmonyReasoningParser(ReasoningParser):
    """GPT-OSS: reasoning is on the analysis channel. Headers are removed, except of calls, for the tool parser."""

    needs_special_tokens = True
    closings = ("<|channel|>final<|message|>", "<|channel|>final <|constrain|>json<|message|>")

    @classmethod
    def marks(cls, prompt: str) -> ReasoningMarks | None:
        opening = f"<|channel|>analysis{MESSAGE}"
        return ReasoningMarks(
            opened=prompt.rstrip().endswith(opening),
            openings=(opening,),
            ends=(ENDS[0],),
            closings=(*ENDS, *OPENERS),
            repeats=True,
            refused=("<|channel|>", "analysis"),
        )

    def _read(self) -> Reading[None]:
        markers = OPENERS + ENDS
        if opener := (yield from read_first_recipient(self._reader)):
            yield from self._read_message(opener)
        while (marker := (yield from self._reader.until(markers, self._add_content))) is not None:
            if marker in OPENERS:
                yield from self._read_message(marker)

    def _read_message(self, opener: str) -> Reading[None]:
        markers = OPENERS + ENDS
        header = yield from read_header(self._reader, opener)
        if not header.complete:
            self._add_content(header.text)
            return
        if header.function is not None:
            self._add_content(header.text)
            take = self._add_content
        elif header.channel == "analysis":
            self._space = "\n" if self._reasoned else ""
            take = self._add_reasoning
        else:
            take = self._add_content
        marker = yield from self._reader.until(markers, take)
        if marker in OPENERS:
            self._reader.unread(marker)
        elif header.function is not None and marker is not None:
            self._add_content(marker)
