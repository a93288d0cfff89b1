"""Calls in Python's notation, `f(k="v", n=1)`: Python literals are read and passed on as JSON."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from jaxis.parsing.json_schema import conjuncts, type_of, types
from jaxis.parsing.text_reader import EndOfTextError, Reading, TextReader
from jaxis.parsing.tool_parsers.call_grammar import CallGrammar, UnwritableCallError, literal, moved, tool_arguments
from jaxis.parsing.tool_parsers.json_call import JSONToolParser, WholeMessageToolParser
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
_FENCE = "```"
_SINGLE_QUOTED = r"/'([^'\\\x00-\x1f]|\\['\\nrt])*'/"
_ARRAY_KEYS = {"type", "items", "minItems", "maxItems"}
_SCALARS = (str, int, float, type(None))


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
    def write_list(cls, grammar: CallGrammar) -> str:
        """Calls in a list, without its brackets."""
        return grammar.repeated(cls.write_python_call(grammar), literal(", "))

    @classmethod
    def _write_value(cls, grammar: CallGrammar, tool: FunctionTool, schema: Mapping[str, Any]) -> str:
        """A literal; one whose schema is not simple is written as JSON, which models read and write too."""
        schema = moved(_scalar(schema, tool.parameters), "#")  # without annotations
        if "const" in schema or "enum" in schema:
            values = [schema["const"]] if "const" in schema else schema["enum"]
            if schema.keys() - {"type", "const", "enum"} or not all(isinstance(value, _SCALARS) for value in values):
                return grammar.json_argument(tool, schema)
            fitting = [spelling for value in values if _has_type(value, schema) for spelling in _spellings(value)]
            if not fitting:
                raise UnwritableCallError("an argument that no value fits")
            return grammar.choice(fitting)
        named = schema.get("type")
        if isinstance(named, list) and named:
            return grammar.choice(cls._write_value(grammar, tool, {**schema, "type": kind}) for kind in named)
        options = schema.get("anyOf")
        if isinstance(options, list) and schema.keys() == {"anyOf"}:
            return grammar.choice(cls._write_value(grammar, tool, option) for option in options)
        if schema.keys() == {"type"} and named in ("boolean", "null"):
            return '("True" | "False")' if named == "boolean" else '"None"'
        if schema == {"type": "string"}:
            return grammar.choice((grammar.json(schema), grammar.terminal(_SINGLE_QUOTED)))
        items = schema.get("items")
        if named == "array" and isinstance(items, Mapping) and schema.keys() <= _ARRAY_KEYS:
            return cls._write_array(grammar, grammar.rule(cls._write_value(grammar, tool, items)), schema)
        if named == "object" and schema.get("properties"):
            with contextlib.suppress(UnwritableCallError):
                return cls._write_dictionary(grammar, tool, schema)
        return grammar.json_argument(tool, schema)

    @classmethod
    def _write_array(cls, grammar: CallGrammar, item: str, schema: Mapping[str, Any]) -> str:
        low, high = schema.get("minItems", 0), schema.get("maxItems")
        if high is not None and high < max(low, 1):
            return literal("[]")
        more = f'(", " {item}){{{max(low - 1, 0)},{"" if high is None else high - 1}}}'
        items = grammar.rule(f"{item} {more}" if high != 1 else item)
        return f'"[" {items}{"" if low else "?"} "]"'

    @classmethod
    def _write_dictionary(cls, grammar: CallGrammar, tool: FunctionTool, given: Mapping[str, Any]) -> str:
        members = []
        for key, schema, is_required in tool_arguments(tool, given):
            value = cls._write_value(grammar, tool, schema)
            name = grammar.choice(_spellings(key))
            members.append((grammar.rule(f'{name} ": " {value}'), is_required))
        return f'"{{" {grammar.listed(members, literal(", "))} "}}"'

    def _read_python_call(self) -> Reading[None]:
        """Reads a call up to its closing parenthesis."""
        name = self._function_name((yield from self._read_name()))
        yield from expect(self._reader, "(")
        if not self._is_call(name):
            raise MalformedCallError
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

    def _function_name(self, name: str) -> str:
        """The function that a call with this name calls."""
        return name

    def _read_keyword(self) -> Reading[str]:
        keyword = yield from self._reader.take_while(lambda text: _KEYWORD.fullmatch(text) is not None)
        yield from expect(self._reader, "=")
        if not keyword:
            raise MalformedCallError
        return keyword


def _scalar(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a value without parts as one mapping, if `$ref` or `allOf` leads to one without alternatives."""
    parts = [part for part in conjuncts(schema, root) if part is not False]
    is_scalar = len(parts) == 1 and not types(schema, root) & {"array", "object"}
    return parts[0] if is_scalar and not {"anyOf", "oneOf"} & parts[0].keys() else schema


def _has_type(value: object, schema: Mapping[str, Any]) -> bool:
    return type_of(value) in types({"type": schema.get("type")}, schema)


def _spellings(value: object) -> Iterable[str]:
    """A string, number, boolean or None as Python writes it; strings with either quotation mark."""
    is_constant = value is None or isinstance(value, bool)
    spellings = [repr(value)] if is_constant else [json.dumps(value, ensure_ascii=False), repr(value)]
    return map(literal, dict.fromkeys(spellings))


class PythonListToolParser(WholeMessageToolParser, PythonicToolParser):
    """Llama 3.2, Llama 4, Gemma 3 and ToolACE: `[f(k="v"), g()]` as the whole message.

    Llama 4 may write special tokens around it.
    """

    bracket = "["
    openers = ("<|python_start|>", "<|python_tag|>")
    dropped = ("<|python_end|>", "<|eot|>", "<|eom|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")

    @classmethod
    def write_calls(cls, grammar: CallGrammar) -> str:
        return grammar.rule(f'"[" {cls.write_list(grammar)} "]"')

    def _read_calls(self) -> Reading[None]:
        yield from expect(self._reader, "[")
        yield from self._read_listed_calls(self._read_python_call)


class Gemma3ToolParser(PythonicToolParser):
    """Gemma 3, asked for code: calls in a block that is fenced as `tool_code`, one a line, or in a list.

    The model may print them (`print(f(k="v"))`), or take them from a module (`default_api.f(k="v")`).
    """

    openers = (f"{_FENCE}tool_code",)
    call_opening = f"{_FENCE}tool_code\n"

    @classmethod
    def write_calls(cls, grammar: CallGrammar) -> str:
        calls = grammar.repeated(cls.write_python_call(grammar), literal("\n"))
        return " ".join((calls, grammar.text(f"\n{_FENCE}")))

    def _read_call(self, _opener: str) -> Reading[None]:
        if (yield from self._reader.skip_space()) == "[":
            self._reader.skip(1)
            yield from self._read_listed_calls(self._read_line)
            yield from self._reader.skip_space()
            with contextlib.suppress(EndOfTextError):
                yield from self._reader.take_if(_FENCE)
            return
        closed = False
        while not closed:
            yield from self._read_line()
            self._end_call()
            yield from self._reader.skip_space()
            with contextlib.suppress(EndOfTextError):
                closed = yield from self._reader.take_if(_FENCE)
            if not (yield from self._reader.peek()):
                return

    def _read_line(self) -> Reading[None]:
        is_printed = "print" not in self._tools and (yield from self._reader.take_if("print("))
        yield from self._read_python_call()
        if is_printed:
            yield from expect(self._reader, ")")

    def _function_name(self, name: str) -> str:
        return name if name in self._tools else name.removeprefix("default_api.")


class LFM2ToolParser(PythonicToolParser):
    """LFM2 and LFM2.5: `<|tool_call_start|>[f(k="v"), g()]<|tool_call_end|>`, or the list in JSON if asked for it."""

    needs_special_tokens = True
    openers = call_markers = ("<|tool_call_start|>",)
    dropped = ("<|tool_call_end|>", "<|im_end|>")
    call_opening = "<|tool_call_start|>["

    @classmethod
    def write_calls(cls, grammar: CallGrammar) -> str:
        return f"{cls.write_list(grammar)} {grammar.text(']<|tool_call_end|>')}"

    def _read_call(self, _opener: str) -> Reading[None]:
        yield from expect(self._reader, "[")
        in_json = (yield from self._reader.skip_space()) == "{"
        yield from self._read_listed_calls(self._read_call_object if in_json else self._read_python_call)


class Olmo3ToolParser(PythonicToolParser):
    """OLMo 3: `<function_calls>f(k="v")</function_calls>`, one call a line. The tags are not special tokens.

    Attributes:
      closing: What comes after the last call.
    """

    openers = call_markers = ("<function_calls>",)
    call_opening = "<function_calls>"
    closing: ClassVar[str] = "</function_calls>"

    @classmethod
    def write_calls(cls, grammar: CallGrammar) -> str:
        calls = grammar.repeated(cls.write_python_call(grammar), literal("\n"))
        return f"{calls} {grammar.text(cls.closing)}"

    def _read_call(self, _opener: str) -> Reading[None]:
        closed = False
        while not closed:
            yield from self._read_python_call()
            self._end_call()
            yield from self._reader.skip_space()
            with contextlib.suppress(EndOfTextError):
                closed = yield from self._reader.take_if(self.closing.strip())
            if not (yield from self._reader.peek()):
                return


class MiniCPMToolParser(Olmo3ToolParser):
    """MiniCPM3: calls between `<|tool_call_start|>` and `<|tool_call_end|>`, in a block that is fenced as `python`."""

    needs_special_tokens = True
    openers = call_markers = ("<|tool_call_start|>",)
    dropped = ("<|tool_call_end|>", "<|im_end|>", "</s>")
    call_opening = f"<|tool_call_start|>\n{_FENCE}python\n"
    closing = f"\n{_FENCE}\n<|tool_call_end|>"

    def _read_call(self, opener: str) -> Reading[None]:
        yield from self._reader.skip_space()
        if (yield from self._reader.take_if(_FENCE)):
            yield from self._reader.take_if("python")
        yield from super()._read_call(opener)
