"""Calls in Python's notation, `f(k="v", n=1)`: Python literals are read and passed on as JSON."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxis.parsing.text_reader import EndOfTextError, Reading, TextReader
from jaxis.parsing.tool_parsers.call_grammar import CallGrammar, UnwritableCallError, literal, tool_arguments
from jaxis.parsing.tool_parsers.json_call import JSONToolParser
from jaxis.parsing.tool_parsers.json_value import MAX_DEPTH, MalformedCallError, expect, read_literal
from jaxis.parsing.tool_parsers.tools import FunctionTool

# Reads Python literals, the arguments of calls in Python's notation, and passes them on as JSON.


_CLOSINGS = {"{": "}", "[": "]", "(": ")"}
_JSON_BRACKETS = {"{": "{", "[": "[", "(": "[", "}": "}", "]": "]", ")": "]"}
_ESCAPES = {**{c: c for c in "\\'\""}, "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_AFTER_STRING = (",", ")", "]", "}", ":", "")


class PythonValueReader:
    """Reads one literal after another.

    Strings, numbers, lists, tuples and dictionaries with strings as keys, and True, False and None, also in JSON's
    spelling. A tuple becomes an array.

    Args:
      reader: Positioned at the beginning of a value when `read` is called.
      take: Called with the JSON text as it comes.
    """

    def __init__(self, reader: TextReader, take: Callable[[str], None]) -> None:
        self._reader = reader
        self._take = take

    def read(self, depth: int = 0) -> Reading[None]:
        """Reads a value.

        Raises:
          MalformedCallError: What comes next is not such a literal.
          EndOfTextError: The text ends inside it.
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
        """Reads a string. A quotation mark inside it that a model forgot to escape is part of it.

        Such a mark is one that nothing follows that may follow a string. Line breaks are taken too.
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


# Calls in Python's notation, `f(k="v", n=1)`.


_KEYWORD = re.compile(r"[^\W\d]\w*")


class PythonicToolParser(JSONToolParser):
    """Reads such a call; all arguments must be given by name."""

    @classmethod
    def write_python_call(cls, grammar: CallGrammar) -> str:
        """A call of one of the functions."""
        calls = []
        for tool in grammar.tools:
            arguments = []
            for key, schema, is_required in tool_arguments(tool):
                if not _KEYWORD.fullmatch(key):
                    raise UnwritableCallError(f"the keyword {key!r}")
                value = cls._write_value(grammar, tool, schema)
                arguments.append((grammar.rule(f"{literal(f'{key}=')} {value}"), is_required))
            listed = grammar.listed(arguments, literal(", "))
            calls.append(grammar.rule(f"{literal(f'{tool.name}(')} {listed} {literal(')')}"))
        return grammar.rule(grammar.choice(calls))

    @classmethod
    def _write_value(cls, grammar: CallGrammar, tool: FunctionTool, schema: Mapping[str, Any]) -> str:
        """A value in Python's spelling, or in JSON's inside of lists and dictionaries."""
        types = schema.get("type")
        if isinstance(types, list) and types and "enum" not in schema and "const" not in schema:
            return grammar.choice(cls._write_value(grammar, tool, {**schema, "type": kind}) for kind in types)
        options = schema.get("anyOf")
        if isinstance(options, list) and schema.keys() == {"anyOf"}:
            return grammar.choice(cls._write_value(grammar, tool, option) for option in options)
        if schema == {"type": "boolean"}:
            return '("True" | "False")'
        return '"None"' if schema == {"type": "null"} else grammar.json_argument(tool, schema)

    def _read_python_call(self) -> Reading[None]:
        """Reads a call up to its closing parenthesis."""
        name = yield from self._read_name()
        yield from expect(self._reader, "(")
        self._start_call(name)
        self._add_arguments("{")
        separator = ""
        while (character := (yield from self._reader.skip_space())) != ")":
            if separator:
                yield from expect(self._reader, ",")
                character = yield from self._reader.skip_space()
                if character == ")":  # a comma after the last argument
                    break
            if not character:
                raise EndOfTextError
            keyword = yield from self._read_keyword()
            self._add_arguments(f"{separator}{json.dumps(keyword, ensure_ascii=False)}: ")
            separator = ", "
            yield from PythonValueReader(self._reader, self._add_arguments).read()
        self._reader.skip(1)
        self._add_arguments("}")
        self._arguments_done = True

    def _read_keyword(self) -> Reading[str]:
        keyword = yield from self._reader.take_while(lambda text: _KEYWORD.fullmatch(text) is not None)
        yield from expect(self._reader, "=")
        if not keyword:
            raise MalformedCallError
        return keyword


class LFM2ToolParser(PythonicToolParser):
    """LFM2 and LFM2.5: `<|tool_call_start|>[f(k="v"), g()]<|tool_call_end|>`, or the list in JSON if asked for it."""

    needs_special_tokens = True
    openers = call_markers = ("<|tool_call_start|>",)
    dropped = ("<|tool_call_end|>", "<|im_end|>")
    call_opening = "<|tool_call_start|>["

    @classmethod
    def write_calls(cls, grammar: CallGrammar) -> str:
        calls = grammar.repeated(cls.write_python_call(grammar), literal(", "))
        return f"{calls} {grammar.text(']<|tool_call_end|>')}"

    def _read_call(self, _opener: str) -> Reading[None]:
        yield from expect(self._reader, "[")
        in_json = (yield from self._reader.skip_space()) == "{"
        yield from self._read_listed_calls(self._read_call_object if in_json else self._read_python_call)


class Olmo3ToolParser(PythonicToolParser):
    """OLMo 3: `<function_calls>f(k="v")</function_calls>`, one call a line. The tags are not special tokens."""

    openers = call_markers = ("<function_calls>",)
    call_opening = "<function_calls>"

    @classmethod
    def write_calls(cls, grammar: CallGrammar) -> str:
        calls = grammar.repeated(cls.write_python_call(grammar), literal("\n"))
        return f"{calls} {grammar.text('</function_calls>')}"

    def _read_call(self, _opener: str) -> Reading[None]:
        closed = False
        while not closed:
            yield from self._read_python_call()
            self._end_call()
            yield from self._reader.skip_space()
            with contextlib.suppress(EndOfTextError):
                closed = yield from self._reader.take_if("</function_calls>")
            if not (yield from self._reader.peek()):
                return
