"""Reasoning between tags at the beginning of the answer."""

from __future__ import annotations

from typing import ClassVar

from jaxis.parsing.reasoning_parsers.base import ReasoningParser
from jaxis.parsing.text_reader import Reading


class ThinkReasoningParser(ReasoningParser):
    """DeepSeek R1 and V3.1, Qwen 3, GLM 4.5, Kimi K2 Thinking. The tags are not special tokens.

    The opening tag is the first thing the model writes, or the template puts it at the end of the prompt; a tag
    anywhere else is content. Reasoning that is cut off by the end of the text is still reasoning.
    """

    opening: ClassVar[str] = "<think>"
    closings: ClassVar[tuple[str, ...]] = ("</think>",)

    def _read(self) -> Reading[None]:
        opened = self._prompt.rstrip().endswith(self.opening)
        self._reader.record()
        yield from self._reader.skip_space()
        space = self._reader.recorded()
        begins = yield from self._reader.comes(self.opening)
        if begins:
            self._reader.skip(len(self.opening))
        if begins or opened:
            yield from self._read_reasoning()
            yield from self._reader.skip_space()
        else:
            self._add_content(space)
        while (yield from self._reader.until(self.dropped, self._add_content)) is not None:
            pass

    def _read_reasoning(self) -> Reading[None]:
        markers = (*self.closings, *self.dropped, *self._tool_dropped)
        while (yield from self._reader.until(markers, self._add_reasoning)) not in (*self.closings, None):
            pass


class MistralReasoningParser(ThinkReasoningParser):
    """Magistral. The tags are special tokens."""

    needs_special_tokens = True
    dropped = ("</s>",)
    opening = "[THINK]"
    closings = ("[/THINK]",)
