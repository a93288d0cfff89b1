"""Reader of one JSON value from a string that arrives in pieces."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from jaxis.parsing.text_reader import EndOfTextError, Reading, TextReader

MAX_DEPTH = 100  # far below the limit of Python's own parser

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_OUTSIDE_STRINGS = re.compile(r"[\s:,.+\-\w]+", re.ASCII)
_LITERAL = re.compile(r"[.+\-\w]+", re.ASCII)
_PYTHON_LITERALS = {"True": "true", "False": "false", "None": "null"}


class MalformedCallError(Exception):
    """Text that began like a call is not one."""


def load_json(text: str) -> Any:
    """Parses JSON that can be serialized again. Raises MalformedCallError if the text is not JSON."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        text.encode()
    except (ValueError, RecursionError) as error:
        raise MalformedCallError from error
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def read_json_value(reader: TextReader, take: Callable[[str], None]) -> Reading[str]:
    """Reads one value, validates it once it is complete, and returns its text.

    `take` gets the text as it arrives, with control characters in strings, which models write although JSON does not
    allow them, escaped. Raises MalformedCallError if there is no value, and EndOfTextError if the text ends inside it.
    """
    scanner = ValueScanner()
    pieces: list[str] = []
    while not scanner.done:
        if scanner.malformed:
            raise MalformedCallError
        try:
            text = yield from reader.available()
        except EndOfTextError:
            if scanner.begun_literal:
                break
            raise
        piece, count = scanner.scan(text)
        reader.skip(count)
        if piece:
            pieces.append(piece)
            take(piece)
    value = "".join(pieces)
    load_json(value)
    return value


def clean_json_object(text: str) -> str:
    """Returns the text of a complete JSON object, with control characters in strings escaped.

    Raises MalformedCallError if the text is not a JSON object.
    """
    text = text.strip()
    clean, count = ValueScanner().scan(text)
    if count < len(text) or not isinstance(load_json(clean), dict):
        raise MalformedCallError
    return clean


def read_json_string(reader: TextReader) -> Reading[str]:
    """Reads a JSON string, and returns its decoded value.

    Raises MalformedCallError if there is no string, or half of a surrogate pair in it, and EndOfTextError if the text
    ends inside it.
    """
    yield from expect(reader, '"', take=False)
    value: str = load_json((yield from read_json_value(reader, lambda _: None)))
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise MalformedCallError from error
    return value


def read_literal(reader: TextReader) -> Reading[str]:
    """Reads a number, true, false or null, also in Python's spelling, and returns it as JSON.

    Raises MalformedCallError if there is none, and EndOfTextError if the text ends where it may go on.
    """
    text = yield from reader.take_while(lambda text: _LITERAL.fullmatch(text) is not None)
    if not (yield from reader.peek()):
        raise EndOfTextError
    literal = _PYTHON_LITERALS.get(text, text)
    load_json(literal)
    return literal


def expect(reader: TextReader, character: str, *, take: bool = True) -> Reading[None]:
    """Skips white space and takes the character that must come next.

    Raises MalformedCallError if another character comes, and EndOfTextError if the text ends.
    """
    found = yield from reader.skip_space()
    if not found:
        raise EndOfTextError
    if found != character:
        raise MalformedCallError
    if take:
        reader.skip(1)


class ValueScanner:
    """Finds the end of a value by tracking strings and brackets only; `json` validates the value at the end."""

    def __init__(self) -> None:
        self.done = False
        self.malformed = False
        self.in_string = False
        self.begun_literal = False  # a number, true, false or null: ends before a character that is not part of it
        self._begun = False
        self._depth = 0
        self._escaped = False

    def scan(self, text: str) -> tuple[str, int]:
        """Scans a part of the text. Returns the value's part of it, escaped, and the number of characters taken."""
        out: list[str] = []
        at = 0
        while at < len(text) and not self.done and not self.malformed:
            at += self._scan_string(text, at, out) if self.in_string else self._scan_outside(text, at, out)
        return "".join(out), at

    def _scan_string(self, text: str, at: int, out: list[str]) -> int:
        character = text[at]
        if self._escaped:
            self._escaped = False
        elif match := _PLAIN.match(text, at):
            out.append(match[0])
            return len(match[0])
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self.in_string = False
            self.done = self._depth == 0
        elif character < " ":
            out.append(json.dumps(character)[1:-1])
            return 1
        out.append(character)
        return 1

    def _scan_outside(self, text: str, at: int, out: list[str]) -> int:
        character = text[at]
        if self._depth == 0 and not (character in '{["' and not self._begun):
            return self._scan_literal(text, at, out)
        self._begun = True
        if character in "{[":
            self._depth += 1
            self.malformed = self._depth > MAX_DEPTH
        elif character in "}]":
            self._depth -= 1
            self.done = self._depth == 0
        elif character == '"':
            self.in_string = True
        elif match := _OUTSIDE_STRINGS.match(text, at):
            out.append(match[0])
            return len(match[0])
        else:
            self.malformed = True
            return 0
        out.append(character)
        return 1

    def _scan_literal(self, text: str, at: int, out: list[str]) -> int:
        self._begun = self.begun_literal = True
        match = _LITERAL.match(text, at)
        self.done = match is None
        if match is None:
            return 0
        out.append(match[0])
        return len(match[0])
