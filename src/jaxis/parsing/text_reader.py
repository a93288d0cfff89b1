"""A reader of text that arrives in pieces, for parsers that are generators: they yield when they need more text.

Such a parser reads as if it had the whole text, and decides nothing before it has seen enough. So the result does not
depend on where the text is cut.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]


class EndOfTextError(Exception):
    """The text has ended inside a construct that is being read."""


class TextReader:
    def __init__(self) -> None:
        self._text = ""
        self._position = 0
        self._ahead_of: int | None = None  # where `ahead` goes back to
        self._recorded: list[str] | None = None
        self._closed = False

    def feed(self, text: str) -> None:
        begin = self._position if self._ahead_of is None else self._ahead_of
        self._text = self._text[begin:] + text
        self._position -= begin
        self._ahead_of = None if self._ahead_of is None else 0

    def ahead(self, reading: Reading[T]) -> Reading[T]:
        """Returns the result of a reading without taking its text. Such readings cannot be nested."""
        recorded, self._recorded = self._recorded, None
        self._ahead_of = self._position
        try:
            return (yield from reading)
        finally:
            self._position, self._ahead_of = self._ahead_of, None
            self._recorded = recorded

    def close(self) -> None:
        """Marks the end of the text: reads no longer wait for more."""
        self._closed = True

    def record(self, text: str = "") -> None:
        """Starts recording what is read, beginning with `text`."""
        self._recorded = [text]

    def recorded(self) -> str:
        """Returns the text read since `record`, and stops recording."""
        text = "".join(self._recorded or ())
        self._recorded = None
        return text

    def rewind(self) -> str:
        """Goes back to the call of `record`, returns the text given to it, and stops recording."""
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
        text = self._text[self._position : self._position + count]
        self._position += len(text)
        if self._recorded is not None:
            self._recorded.append(text)
        return text

    def available(self) -> Reading[str]:
        """Returns the available text, at least one character, without taking it. Raises EndOfTextError at the end."""
        while self._position == len(self._text):
            if self._closed:
                raise EndOfTextError
            yield
        return self._text[self._position :]

    def peek(self) -> Reading[str]:
        """Returns the next character without taking it; empty at the end."""
        while self._position == len(self._text) and not self._closed:
            yield
        return self._text[self._position : self._position + 1]

    def skip_space(self) -> Reading[str]:
        """Takes white space, and returns the character after it without taking it; empty at the end."""
        while (character := (yield from self.peek())).isspace():
            self.skip(1)
        return character

    def comes(self, literal: str) -> Reading[bool]:
        """Returns whether the literal comes next."""
        while len(rest := self._text[self._position : self._position + len(literal)]) < len(literal):
            if self._closed or not literal.startswith(rest):
                return False
            yield
        return rest == literal

    def take_if(self, literal: str) -> Reading[bool]:
        """Takes the literal if it comes next.

        Raises EndOfTextError if the text ends inside the literal; the part that is there is taken.
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
        """Takes characters as long as all of them together are allowed."""
        taken = ""
        while character := (yield from self.peek()):
            if not allowed(taken + character):
                break
            taken += self.skip(1)
        return taken

    def until(self, markers: tuple[str, ...], take: Callable[[str], None]) -> Reading[str | None]:
        """Reads up to the first marker, which is taken and returned; None if the text ends without one.

        If two markers begin at the same place, the first in the list counts. `take` gets the text before, as it comes.
        """
        while True:
            end, marker = _find(self._text, self._position, markers, self._closed)
            if end > self._position:
                take(self.skip(end - self._position))
            if marker is not None:
                return self.skip(len(marker))
            if self._closed:
                return None
            yield


def _find(text: str, begin: int, markers: tuple[str, ...], closed: bool) -> tuple[int, str | None]:
    """Returns the position of the first marker, and the marker; else the length that certainly precedes any marker."""
    found = _pattern(markers).search(text, begin) if markers else None
    end = found.start() if found else len(text)
    if closed:
        return end, found and found[0]
    # A marker of which only a part has arrived may begin before the one found, or be listed before it.
    for at in range(max(begin, len(text) - max(map(len, markers), default=0) + 1), min(end + 1, len(text))):
        earlier = markers[: markers.index(found[0])] if found and at == end else markers
        if any(len(marker) > len(text) - at and marker.startswith(text[at:]) for marker in earlier):
            return at, None
    return end, found and found[0]


@functools.lru_cache(maxsize=256)
def _pattern(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)))
