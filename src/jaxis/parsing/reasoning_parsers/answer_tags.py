"""Reasoning and answer both between tags: `<think>...</think><response>...</response>`."""

from __future__ import annotations

from typing import ClassVar

from jaxis.parsing.reasoning_parsers.tags import ThinkReasoningParser
from jaxis.parsing.text_reader import Reading


class AnswerTagsReasoningParser(ThinkReasoningParser):
    """Removes the tags around the answer.

    The closing tag is removed at the end of an answer that the opening tag opened, and before a call, which
    `call_openers` of the model's tool parser begin; elsewhere it is content.
    """

    answer_tags: ClassVar[tuple[str, str]]
    call_openers: ClassVar[tuple[str, ...]]

    def _read_answer(self) -> Reading[None]:
        opening, closing = self.answer_tags
        if not (yield from self._reader.comes(opening)):
            yield from super()._read_answer()
            return
        self._reader.skip(len(opening))
        yield from self._reader.skip_space()
        held = ""  # white space, then the closing tag and what white space follows it: content if more text comes
        closed = False

        def take(text: str) -> None:
            nonlocal held, closed
            if closed and not text.strip():
                held += text
                return
            text, closed = held + text, False
            content = text.rstrip()
            held = text[len(content) :]
            self._add_content(content)

        markers = (closing, *self.call_openers, *self.dropped, *self._tool_dropped)
        while (marker := (yield from self._reader.until(markers, take))) is not None:
            if marker == closing:
                if closed:
                    self._add_content(held)
                    held = ""
                held, closed = held + marker, True
            elif marker in self.call_openers:
                self._add_content((held[: held.index(closing)] if closed else held) + marker)
                held, closed = "", False
        if not closed:
            self._add_content(held)


class HunyuanReasoningParser(AnswerTagsReasoningParser):
    """Hunyuan A13B and the dense ones: `<think>\\n...\\n</think>\\n<answer>\\n...\\n</answer>`."""

    answer_tags = ("<answer>", "</answer>")
    call_openers = ("<tool_calls>",)


class ErnieReasoningParser(AnswerTagsReasoningParser):
    """ERNIE 4.5 Thinking: `<think>\\n...\\n</think>\\n\\n<response>\\n...\\n</response>`."""

    answer_tags = ("<response>", "</response>")
    call_openers = ("<tool_call>",)
