"""Reader of Python literals, the arguments of calls in Python's notation. It writes them as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from jaxis.parsing.text_reader import EndOfTextError, Reading, TextReader
from jaxis.parsing.tool_parsers.json_value import MAX_DEPTH, MalformedCallError, expect, read_literal

_CLOSINGS = {"{": "}", "[": "]", "(": ")"}
_JSON_BRACKETS = {"{": "{", "[": "[", "(": "[", "}": "}", "]": "]", ")": "]"}
_ESCAPES = {**{c: c for c in "\\'\""}, "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_AFTER_STRING = (",", ")", "]", "}", ":", "")


class PythonValueReader:
    """Reads one literal after another, and passes on its JSON text as it comes.

    Strings, numbers, lists, tuples and dictionaries with strings as keys, and True, False and None, also in JSON's
    spelling. A tuple becomes an array.
    """

    def __init__(self, reader: TextReader, take: Callable[[str], None]) -> None:
        self._reader = reader
        self._take = take

    def read(self, depth: int = 0) -> Reading[None]:
        """Reads the value at which the reader stands.

        Raises MalformedCallError if there is no such literal, and EndOfTextError if the text ends inside it.
        """
        first = yield from self._reader.skip_space()
        if not first:
            raise EndOfTextError
        if first in _CLOSINGS:
            yield from self._read_items(first, depth + 1)
        elif first in "'\"":
            yield from self._read_string(first)
        else:
            self._take((yield from read_literal(self._reader)))

    def _read_items(self, opening: str, depth: int) -> Reading[None]:
        if depth > MAX_DEPTH:
            raise MalformedCallError
        closing, separator = _CLOSINGS[opening], ""
        self._reader.skip(1)
        self._take(_JSON_BRACKETS[opening])
        while (character := (yield from self._reader.skip_space())) != closing:
            if separator:
                yield from expect(self._reader, ",")
                character = yield from self._reader.skip_space()
                if character == closing:  # a comma after the last item
                    break
            if not character:
                raise EndOfTextError
            self._take(separator)
            separator = ", "
            if opening == "{":
                yield from self._read_key(character)
            yield from self.read(depth)
        self._reader.skip(1)
        self._take(_JSON_BRACKETS[closing])

    def _read_key(self, quote: str) -> Reading[None]:
        if quote not in "'\"":
            raise MalformedCallError
        yield from self._read_string(quote)
        yield from expect(self._reader, ":")
        self._take(": ")

    def _read_string(self, quote: str) -> Reading[None]:
        """Reads a string with any line breaks, and with quotation marks that a model forgot to escape.

        Such a mark is one that nothing follows that may follow a string.
        """
        self._reader.skip(1)
        self._take('"')
        end = quote
        if (yield from self._reader.take_if(quote * 2)):
            end = quote * 3
        while True:
            marker = yield from self._reader.until((end, "\\"), lambda text: self._take(_escape(text)))
            if marker is None:
                raise EndOfTextError
            if marker == "\\":
                yield from self._read_escape()
                continue
            space = yield from self._reader.take_while(str.isspace)
            if (yield from self._reader.peek()) in _AFTER_STRING:
                self._take('"')
                return
            self._take(_escape(marker + space))

    def _read_escape(self) -> Reading[None]:
        character = (yield from self._reader.available())[0]
        self._reader.skip(1)
        if character in _HEX_DIGITS:
            yield from self._read_code_point(_HEX_DIGITS[character])
        elif character != "\n":  # an escaped line break joins two lines
            self._take(_escape(_ESCAPES.get(character, "\\" + character)))

    def _read_code_point(self, num_digits: int) -> Reading[None]:
        digits = ""
        while len(digits) < num_digits:
            text = yield from self._reader.available()
            digits += self._reader.skip(min(len(text), num_digits - len(digits)))
        if re.fullmatch("[0-9A-Fa-f]+", digits) is None or (code := int(digits, 16)) > 0x10FFFF:
            raise MalformedCallError
        # JSON's escape, since two of them may be the halves of one character.
        self._take(f"\\u{code:04x}" if code <= 0xFFFF else _escape(chr(code)))


def _escape(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
