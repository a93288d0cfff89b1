"""The base class of reasoning parsers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from jaxis.parsing.parser_events import ContentDelta, Event, ReasoningDelta, merge_deltas
from jaxis.parsing.text_reader import Reading, TextReader


@dataclass(frozen=True)
class ReasoningMarks:
    """How reasoning is marked in one answer's text.

    Attributes:
      opened: The answer begins inside the reasoning.
      openings: What may open it, if nothing but white space comes before.
      ends: For each of them, what ends the reasoning that it began; the first also for what the prompt opened.
      closings: Whatever may end it, calls of tools included.
      interruptions: Those of them that belong to what comes after.
      answer_openings: Special tokens, one of which may come between the reasoning and the answer.
      repeats: Reasoning may come several times, and anywhere.
      refused: What comes before, and a word that opens reasoning where it follows it; None if no single word does.
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

    Args:
      prompt: The rendered prompt, of which only the end counts: a template may open the reasoning.
      tool_dropped: Special tokens to leave out of the reasoning too, if the text contains them only because the tool
        parser needs them; that parser leaves them out of the content.
    """

    needs_special_tokens: ClassVar[bool] = False
    opening: ClassVar[str] = ""
    closings: ClassVar[tuple[str, ...]] = ()
    more_openings: ClassVar[dict[str, str]] = {}
    interruptions: ClassVar[tuple[str, ...]] = ()
    answer_openings: ClassVar[tuple[str, ...]] = ()
    dropped: ClassVar[tuple[str, ...]] = ()

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
        """Whether the prompt ends with the marker that opens the reasoning."""
        return prompt.rstrip().endswith(cls.opening)

    @classmethod
    def marks(cls, prompt: str) -> ReasoningMarks | None:
        """How an answer's reasoning is marked; None if the prompt leaves no place for any."""
        return cls.marks_before_answer(prompt)

    @classmethod
    def marks_before_answer(cls, prompt: str) -> ReasoningMarks | None:
        """How all that comes before the answer itself is marked; None if the prompt ends with it."""
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
        """Takes the next part of the text, which may be cut anywhere.

        Returns:
          `ReasoningDelta` and `ContentDelta`; text for a tool parser to read is content.
        """
        self._reader.feed(delta_text)
        return self._advance()

    def finish(self) -> list[Event]:
        """Ends the text; the parser takes no more. Returns what was held back."""
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
