from __future__ import annotations

from jaxis.parsing.reasoning_parsers.base import ReasoningMarks, ReasoningParser
from jaxis.parsing.text_reader import Reading
from jaxis.parsing.tool_parsers.inkling import (
    INKLING_CALL,
    INKLING_ENDS,
    INKLING_KINDS,
    INKLING_MESSAGE,
    INKLING_TEXT,
    INKLING_THINKING,
    read_inkling_header,
)

_MARKERS = (INKLING_MESSAGE, *INKLING_KINDS, *INKLING_ENDS)


class InklingReasoningParser(ReasoningParser):
    """Inkling: reasoning is in messages of their own kind. Headers and kinds are removed, except before calls."""

    needs_special_tokens = True
    closings = (INKLING_TEXT,)
    interruptions = (INKLING_CALL,)

    @classmethod
    def marks(cls, prompt: str) -> ReasoningMarks | None:
        return ReasoningMarks(
            opened=prompt.rstrip().endswith(INKLING_THINKING),
            openings=(INKLING_THINKING,),
            ends=(INKLING_ENDS[0],),
            closings=(*INKLING_ENDS, INKLING_MESSAGE, INKLING_TEXT, INKLING_CALL),
            repeats=True,
            refused=(INKLING_MESSAGE, INKLING_THINKING),
        )

    def _read(self) -> Reading[None]:
        kinds = (kind for kind in INKLING_KINDS if self._prompt.rstrip().endswith(kind))
        marker: str | None = next(kinds, INKLING_MESSAGE)
        while marker is not None:
            opened, take = marker, self._add_content
            if opened == INKLING_MESSAGE:
                take((yield from read_inkling_header(self._reader)))
            elif opened == INKLING_THINKING:
                self._space = "\n" if self._reasoned else ""
                take = self._add_reasoning
            elif opened == INKLING_CALL:
                take(INKLING_MESSAGE + INKLING_CALL)  # without the first, text before it could be a header
            marker = yield from self._reader.until(_MARKERS, take)
            if opened == INKLING_CALL and marker in INKLING_ENDS:
                take(marker)
