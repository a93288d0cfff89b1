"""Text that arrives in pieces, for a parser that is a generator: it yields when it needs more.

A parser written so reads like one for a whole text, and decides nothing before it has seen what the decision needs:
where the text is cut makes no difference.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]


class EndOfTextError(Exception):
    """The text has ended inside something."""


class TextReader:
    """The text that is left to read."""

    def __init__(self) -> None:
        self._text = ""
        self._position = 0
        self._recorded: list[str] | None = None
        self._closed = False

    def feed(self, text: str) -> None:
        """Adds text at the end."""
        self._text = self._text[self._position :] + text
        self._position = 0

    def close(self) -> None:
        """No more text will come: readings no longer wait."""
        self._closed = True

    def record(self, text: str = "") -> None:
        """Remembers what is read from here on, after `text`."""
        self._recorded = [text]

    def recorded(self) -> str:
        """The text read since `record`; ends the record."""
        text = "".join(self._recorded or ())
        self._recorded = None
        return text

    def rewind(self) -> str:
        """Goes back to where `record` was called, and returns the text given to it; ends the record."""
        text, *taken = self._recorded or [""]
        self._text = "".join(taken) + self._text[self._position :]
        self._position = 0
        self._recorded = None
        return text

    def unread(self, text: str) -> None:
        """Puts back what was just taken."""
        self._position -= len(text)
        if self._recorded is not None:
            self._recorded.append(self._recorded.pop().removesuffix(text))

    def skip(self, count: int) -> str:
        """Takes characters that a reading has shown."""
        text = self._text[self._position : self._position + count]
        self._position += len(text)
        if self._recorded is not None:
            self._recorded.append(text)
        return text

    def available(self) -> Reading[str]:
        """What is there, at least one character, without taking it.

        Raises:
          EndOfTextError: There will be no more.
        """
        while self._position == len(self._text):
            if self._closed:
                raise EndOfTextError
            yield
        return self._text[self._position :]

    def peek(self) -> Reading[str]:
        """The next character, without taking it; empty at the end."""
        while self._position == len(self._text) and not self._closed:
            yield
        return self._text[self._position : self._position + 1]

    def skip_space(self) -> Reading[str]:
        """Takes white space, and shows the character after it; empty at the end."""
        while (character := (yield from self.peek())).isspace():
            self.skip(1)
        return character

    def comes(self, literal: str) -> Reading[bool]:
        """Whether the literal comes next."""
        while len(rest := self._text[self._position : self._position + len(literal)]) < len(literal):
            if self._closed or not literal.startswith(rest):
                return False
            yield
        return rest == literal

    def take_if(self, literal: str) -> Reading[bool]:
        """Takes the literal if it comes next.

        Raises:
          EndOfTextError: The text ends inside the literal; what there is of it is taken.
        """
        if (yield from self.comes(literal)):
            self.skip(len(literal))
            return True
        rest = self._text[self._position :]
        if rest and literal.startswith(rest):
            self.skip(len(rest))
            raise EndOfTextError
        return False

    def take_while(self, allowed: Callable[[str], bool]) -> Reading[str]:
        """Takes characters as long as the text of all of them is allowed."""
        taken = ""
        while character := (yield from self.peek()):
            if not allowed(taken + character):
                break
            taken += self.skip(1)
        return taken

    def until(self, markers: tuple[str, ...], take: Callable[[str], None]) -> Reading[str | None]:
        """Reads up to the first marker.

        Args:
          markers: Where two begin at one place, the one that stands first here counts.
          take: Called with the text before the marker, as it comes.

        Returns:
          The marker, taken; None when the text ends without one.
        """
        while True:
            text = self._text[self._position :]
            end, marker = _find(text, markers, self._closed)
            if end:
                take(self.skip(end))
            if marker is not None:
                return self.skip(len(marker))
            if self._closed:
                return None
            yield


def _find(text: str, markers: tuple[str, ...], closed: bool) -> tuple[int, str | None]:
    """Where the first marker begins, and it; or how much of the text is certainly before any."""
    found = min(((at, i) for i, marker in enumerate(markers) if (at := text.find(marker)) >= 0), default=None)
    end = len(text) if found is None else found[0]
    if not closed:
        # A marker that has come only in part, and may begin before the one found or stand before it in the order.
        for i, marker in enumerate(markers):
            for at in range(max(0, len(text) - len(marker) + 1), min(end + 1, len(text))):
                if marker.startswith(text[at:]) and (found is None or (at, i) < found):
                    end, found = at, None
                    break
    return end, None if found is None else markers[found[1]]
