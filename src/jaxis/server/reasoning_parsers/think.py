"""Reasoning between `<think>` and `</think>`."""

from __future__ import annotations

from jaxis.server.reasoning_parsers.base import ReasoningParser
from jaxis.server.text_reader import Reading

_OPEN = "<think>"
_CLOSE = "</think>"


class ThinkReasoningParser(ReasoningParser):
    """DeepSeek R1 and V3.1, Qwen 3, GLM 4.5, Kimi K2 Thinking. The tags are not special tokens.

    The model opens the reasoning as the first thing it says, or the template does at the end of the prompt; a tag
    anywhere else is content. Reasoning cut by the end of the text is reasoning.
    """

    def _read(self) -> Reading[None]:
        opened = self._prompt.rstrip().endswith(_OPEN)
        self._reader.record()
        yield from self._reader.skip_space()
        if (yield from self._reader.take_if(_OPEN)) or opened:
            yield from self._read_reasoning()
            yield from self._reader.skip_space()
        else:
            self._add_content(self._reader.recorded())
        yield from self._reader.until((), self._add_content)

    def _read_reasoning(self) -> Reading[None]:
        markers = (_CLOSE, *self._dropped)
        while (yield from self._reader.until(markers, self._add_reasoning)) not in (_CLOSE, None):
            pass
