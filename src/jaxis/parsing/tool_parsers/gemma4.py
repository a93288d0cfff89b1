from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxis.parsing.json_schema import types
from jaxis.parsing.text_reader import EndOfTextError, Reading
from jaxis.parsing.tool_parsers.base import ToolParser
from jaxis.parsing.tool_parsers.call_grammar import CallGrammar, UnwritableCallError, literal, tool_arguments
from jaxis.parsing.tool_parsers.json_value import MAX_DEPTH, MalformedCallError, expect, read_json_string, read_literal
from jaxis.parsing.tool_parsers.tools import FunctionTool

_CLOSINGS = {"{": "}", "[": "]"}
_VALUE_BEGINNINGS = frozenset('"{[-0123456789tfnTFN')
_KEY = re.compile(r'[^:,{}\[\]<"\n]+')


class Gemma4ToolParser(ToolParser):
    """Gemma's own notation of calls: `<|tool_call>call:f{k:<|"|>v<|"|>,n:1}<tool_call|>`.

    Arguments are like JSON, but keys have no quotes, and strings have a special token as quote and no escapes.
    """

    needs_special_tokens = True
    openers = call_markers = ("<|tool_call>",)
    dropped = ("<|tool_response>", "<turn|>", "<eos>")
    call_opening = "<|tool_call>"
    quote: ClassVar[str] = '<|"|>'
    closing: ClassVar[str] = "<tool_call|>"

    @classmethod
    def write_calls(cls, grammar: CallGrammar) -> str:
        calls = (
            f"{literal(f'call:{tool.name}')} {cls._write_object(grammar, tool, tool.parameters)}"
            for tool in grammar.tools
        )
        return f"{grammar.choice(calls)} {grammar.text(cls.closing)}"

    @classmethod
    def _write_value(cls, grammar: CallGrammar, tool: FunctionTool, schema: Mapping[str, Any]) -> str:
        """Returns a value. If its schema is not simple, the value is JSON, which models read and write too."""
        if types(schema, tool.parameters) == {"string"}:
            return f"{grammar.text(cls.quote)} {grammar.verbatim_string(tool, schema, cls.quote)}"
        items = schema.get("items")
        if schema.get("type") == "array" and isinstance(items, Mapping) and schema.keys() <= {"type", "items"}:
            item = grammar.rule(cls._write_value(grammar, tool, items))
            return f'"[" ({item} ("," {item})*)? "]"'
        if schema.get("type") == "object" and schema.get("properties"):
            with contextlib.suppress(UnwritableCallError):
                return cls._write_object(grammar, tool, schema)
        return grammar.json_argument(tool, schema)

    @classmethod
    def _write_object(cls, grammar: CallGrammar, tool: FunctionTool, given: Mapping[str, Any]) -> str:
        members = []
        for key, schema, is_required in tool_arguments(tool, given):
            if not _KEY.fullmatch(key) or key != key.strip():
                raise UnwritableCallError(f"the key {key!r}")
            value = cls._write_value(grammar, tool, schema)
            members.append((grammar.rule(f"{literal(f'{key}:')} {value}"), is_required))
        return f'"{{" {grammar.listed(members, literal(","))} "}}"'

    def _read_call(self, _opener: str) -> Reading[None]:
        if not (yield from self._reader.skip_space()):
            raise EndOfTextError
        if not (yield from self._reader.take_if("call:")):
            raise MalformedCallError
        name = yield from self._read_name()
        has_arguments = not (yield from self._reader.comes(self.closing))
        if has_arguments:
            yield from expect(self._reader, "{", take=False)
        self._start_call(name)
        if has_arguments:
            yield from self._read_value(0)
        else:
            self._add_arguments("{}")
        self._arguments_done = True
        yield from self._reader.skip_space()
        yield from self._reader.take_if(self.closing)
        self._end_call()

    def _read_value(self, depth: int, within: str = "") -> Reading[None]:
        first = yield from self._reader.skip_space()
        if not first:
            raise EndOfTextError
        if first in _CLOSINGS:
            yield from self._read_items(first, depth + 1)
        elif first == '"':
            self._add_arguments(_quoted((yield from read_json_string(self._reader))))
        elif (yield from self._reader.take_if(self.quote)):
            yield from self._read_string(within)
        else:
            self._add_arguments((yield from read_literal(self._reader)))

    def _read_string(self, within: str) -> Reading[None]:
        """Reads a string after its quote, up to a quote after which the string's brackets can go on."""
        self._add_arguments('"')
        while True:
            marker = yield from self._reader.until((self.quote,), lambda text: self._add_arguments(_quoted(text)[1:-1]))
            if marker is None:
                raise EndOfTextError
            try:
                ends = yield from self._reader.ahead(self._follows_string(within))
            except EndOfTextError:
                ends = True
            if ends:
                break
            self._add_arguments(_quoted(marker)[1:-1])
        self._add_arguments('"')

    def _follows_string(self, within: str) -> Reading[bool]:
        following = yield from self._reader.skip_space()
        if following != ",":
            return following in ("", _CLOSINGS[within])
        self._reader.skip(1)
        first = yield from self._reader.skip_space()
        if within == "[":
            return first in ("", *_VALUE_BEGINNINGS) or (yield from self._reader.comes(self.quote))
        try:
            yield from self._read_key()
        except MalformedCallError:
            return False
        return True

    def _read_items(self, opening: str, depth: int) -> Reading[None]:
        if depth > MAX_DEPTH:
            raise MalformedCallError
        closing, separator = _CLOSINGS[opening], ""
        self._reader.skip(1)
        self._add_arguments(opening)
        while (character := (yield from self._reader.skip_space())) != closing:
            if not character:
                raise EndOfTextError
            if separator:
                yield from expect(self._reader, ",")
                self._add_arguments(separator)
            separator = ", "
            if opening == "{":
                self._add_arguments(f"{_quoted((yield from self._read_key()))}: ")
            yield from self._read_value(depth, opening)
        self._reader.skip(1)
        self._add_arguments(closing)

    def _read_key(self) -> Reading[str]:
        pieces: list[str] = []
        first = yield from self._reader.skip_space()
        if first == '"':
            pieces.append((yield from read_json_string(self._reader)))
        elif (yield from self._reader.take_if(self.quote)):
            if (yield from self._reader.until((self.quote,), pieces.append)) is None:
                raise EndOfTextError
        else:
            pieces.append((yield from self._reader.take_while(lambda text: _KEY.fullmatch(text) is not None)).strip())
        yield from expect(self._reader, ":")
        if not (key := "".join(pieces)):
            raise MalformedCallError
        return key


class FunctionGemmaToolParser(Gemma4ToolParser):
    """FunctionGemma: `<start_function_call>call:f{k:<escape>v<escape>,n:1}<end_function_call>`, once for each call."""

    openers = call_markers = ("<start_function_call>",)
    dropped = ("<start_function_response>", "<end_of_turn>", "<eos>")
    call_opening = "<start_function_call>"
    quote = "<escape>"
    closing = "<end_function_call>"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
