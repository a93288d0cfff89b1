from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from jaxis.parsing.parser_events import ContentDelta, Event, ReasoningDelta, merge_deltas
from jaxis.parsing.text_reader import Reading, TextReader


@dataclass(frozen=True)
class ReasoningMarks:
    """Marks of the reasoning in one answer's text.

    Attributes:
      opened: True if the answer begins inside the reasoning.
      openings: Marks that may open it, if only white space comes before.
      ends: Marks that end the reasoning, one for each opening; the first also ends reasoning that the prompt opened.
      closings: All marks that may end it, tool calls included.
      interruptions: Closings that belong to the text after the reasoning.
      answer_openings: Special tokens, one of which may come between the reasoning and the answer.
      repeats: Reasoning may come several times, and anywhere.
      refused: (Text before, word) of a word that opens reasoning after that text; None if no single word opens it.
    """

    opened: bool
    openings: tuple[str, ...]
    ends: tuple[str, ...]
    closings: tuple[str, ...]
    interruptions: tuple[str, ...] = ()
    answer_openings: tuple[str, ...] = ()
    repeats: bool = False
    refused: tuple[str, str] | None = None


class ReasoningParser(ABC):
    """Splits one answer's text into reasoning and content. One parser serves one answer.

    Attributes:
      needs_special_tokens: The format's markers are special tokens: the text must be decoded with
        `skip_special_tokens=False`.
      opening: The marker that opens the reasoning; empty if answers always begin with reasoning.
      closings: Markers that may close it; the content follows.
      more_openings: Other markers that may open it, each with the one that then closes it.
      interruptions: Markers of tool calls that end it too, for the tool parser to read.
      answer_openings: Special tokens that may come between the reasoning and the content.
      dropped: Special tokens without meaning here, such as those that end a turn.
      suffixed: Attributes with tags that end as the tokenizer's do, such as `<think:opensource>`.

    Args:
      prompt: The rendered prompt. Only its end counts: a template may open the reasoning.
      tool_dropped: Special tokens that the text contains only for the tool parser, to leave out of the reasoning too.
    """

    needs_special_tokens: ClassVar[bool] = False
    opening: ClassVar[str] = ""
    closings: ClassVar[tuple[str, ...]] = ()
    more_openings: ClassVar[dict[str, str]] = {}
    interruptions: ClassVar[tuple[str, ...]] = ()
    answer_openings: ClassVar[tuple[str, ...]] = ()
    dropped: ClassVar[tuple[str, ...]] = ()
    suffixed: ClassVar[tuple[str, ...]] = ()

    def __init__(self, prompt: str = "", tool_dropped: Sequence[str] = ()) -> None:
        self._prompt = prompt
        self._tool_dropped = tuple(tool_dropped)
        self._reader = TextReader()
        self._events: list[Event] = []
        self._space = ""  # white space held back: not part of the reasoning if that ends here
        self._reasoned = False
        self._reading = self._read()

    @classmethod
    def opened_by(cls, prompt: str) -> bool:
        """Returns whether the prompt ends with the marker that opens the reasoning."""
        return prompt.rstrip().endswith(cls.opening)

    @classmethod
    def marks(cls, prompt: str) -> ReasoningMarks | None:
        """Returns the marks of an answer's reasoning; None if there can be no reasoning after this prompt."""
        return cls.marks_before_answer(prompt)

    @classmethod
    def marks_before_answer(cls, prompt: str) -> ReasoningMarks | None:
        """Returns the marks around the text before the answer; None if the prompt ends with it."""
        prompt = prompt.rstrip()
        if prompt.endswith(cls.closings):
            return None
        return ReasoningMarks(
            opened=cls.opened_by(prompt),
            openings=(cls.opening, *cls.more_openings),
            ends=(cls.closings[0], *cls.more_openings.values()),
            closings=(*cls.closings, *cls.interruptions),
            interruptions=cls.interruptions,
            answer_openings=cls.answer_openings,
        )

    def feed(self, delta_text: str) -> list[Event]:
        """Takes the next part of the text, which may be cut anywhere; text for a tool parser to read is content."""
        self._reader.feed(delta_text)
        return self._advance()

    def finish(self) -> list[Event]:
        """Ends the text, and returns the events that were held back. The parser takes no more."""
        self._reader.close()
        return self._advance()

    @abstractmethod
    def _read(self) -> Reading[None]:
        """Reads all of the text, with `_add_reasoning` and `_add_content`."""

    def _advance(self) -> list[Event]:
        next(self._reading, None)
        events, self._events = self._events, []
        return merge_deltas(events)

    def _add_reasoning(self, text: str) -> None:
        if not self._reasoned:
            text = text.lstrip()
        text = self._space + text
        reasoning = text.rstrip()
        self._space = text[len(reasoning) :]
        if reasoning:
            self._reasoned = True
            self._events.append(ReasoningDelta(reasoning))

    def _add_content(self, text: str) -> None:
        self._space = ""
        if text:
            self._events.append(ContentDelta(text))
