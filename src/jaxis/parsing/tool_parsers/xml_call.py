"""GLM 4.5 to 4.7: `<tool_call>f`, then `<arg_key>k</arg_key><arg_value>v</arg_value>` each, then `</tool_call>`."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxis.parsing.text_reader import EndOfTextError, Reading
from jaxis.parsing.tool_parsers.base import ToolParser
from jaxis.parsing.tool_parsers.call_grammar import CallGrammar, literal, tool_arguments
from jaxis.parsing.tool_parsers.json_value import MalformedCallError, load_json
from jaxis.parsing.tool_parsers.tools import FunctionTool

_JSON_TYPES = {dict: "object", list: "array", str: "string", int: "integer", float: "number", bool: "boolean"}


class XMLToolParser(ToolParser):
    """Converts such arguments to one JSON object, with the types that the function's schema gives.

    Attributes:
      values_on_own_lines: Templates put a line break before and after a value, which are not part of it.
    """

    values_on_own_lines: ClassVar[bool] = False

    @classmethod
    def write_arguments(
        cls, grammar: CallGrammar, tool: FunctionTool, before_key: str, after_key: str, end: str, after_value: str
    ) -> str:
        """All of a function's arguments, those that are optional or not; the strings are what stands around each.

        A string is written verbatim, anything else as JSON, which is how a value is read that may be either.
        """
        arguments: list[tuple[str, bool]] = []
        for key, schema, is_required in tool_arguments(tool):
            is_string = value_types(schema) == {"string"}
            line_break = "\n" if cls.values_on_own_lines else ""
            before = f"{grammar.text(before_key)} {literal(key)}"
            before = f"{before} {grammar.text(cls._mark(after_key, is_string) + line_break)}"
            if is_string:
                value = grammar.verbatim_string(schema, end, break_before_end=cls.values_on_own_lines)
            else:
                value = f"{grammar.json_argument(tool, schema)} {grammar.text(line_break + end)}"
            arguments.append((grammar.rule(f"{before} {value} {grammar.text(after_value)}"), is_required))
        return " ".join(rule if is_required else f"{rule}?" for rule, is_required in arguments)

    @classmethod
    def _mark(cls, after_key: str, _is_string: bool) -> str:
        """What comes between key and value, where it says whether the value is a string."""
        return after_key

    def _begin(self, name: str) -> None:
        self._start_call(name)
        self._name = name
        self._num_arguments = 0

    def _finish_arguments(self) -> None:
        self._add_arguments("}" if self._num_arguments else "{}")
        self._arguments_done = True

    def _expect(self, literal: str) -> Reading[None]:
        """Skips white space and takes the string that must come next."""
        if not (yield from self._reader.skip_space()):
            raise EndOfTextError
        if not (yield from self._reader.take_if(literal)):
            raise MalformedCallError

    def _read_text(self, end: str) -> Reading[str]:
        """Reads up to `end`; returns the text, stripped."""
        pieces: list[str] = []
        if (yield from self._reader.until((end,), pieces.append)) is None:
            raise EndOfTextError
        return "".join(pieces).strip()

    def _read_value(self, key: str, end: str, *, is_string: bool | None = None) -> Reading[None]:
        """Reads an argument's value up to `end`.

        Args:
          key: The argument's name.
          end: The marker that closes the value.
          is_string: Whether the value is a string, if the format says so; None consults the schema.
        """
        types = value_types(self._schema(key))
        self._add_arguments(f"{', ' if self._num_arguments else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        self._num_arguments += 1
        if is_string or (is_string is None and types == {"string"}):
            self._add_arguments('"')
            yield from self._read_string(end)
            self._add_arguments('"')
            return
        pieces: list[str] = []
        if (yield from self._reader.until((end,), pieces.append)) is None:
            raise EndOfTextError
        text = "".join(pieces)
        if self.values_on_own_lines:
            text = text.removeprefix("\n").removesuffix("\n")
        self._add_arguments(_json_value(text, types))

    def _read_string(self, end: str) -> Reading[None]:
        """Passes a string on as it arrives, minus the line breaks around it."""
        held = ""

        def take(text: str) -> None:
            nonlocal held
            text = held + text
            held = "\n" if self.values_on_own_lines and text.endswith("\n") else ""
            self._add_arguments(_escape(text.removesuffix(held)))

        if self.values_on_own_lines:
            yield from self._reader.take_if("\n")
        if (yield from self._reader.until((end,), take)) is None:
            raise EndOfTextError

    def _schema(self, key: str) -> Mapping[str, Any]:
        tool = self._tools.get(self._name)
        schema = tool.parameters.get("properties", {}).get(key) if tool else None
        return schema if isinstance(schema, Mapping) else {}


def _escape(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def value_types(schema: Mapping[str, Any]) -> set[str]:
    """The JSON types that a schema allows; empty if it does not say."""
    if isinstance(kind := schema.get("type"), str):
        return {kind}
    if isinstance(kind, list):
        return {name for name in kind if isinstance(name, str)}
    if isinstance(values := schema.get("enum"), list):
        return {_JSON_TYPES.get(type(value), "null") for value in values}
    options = schema.get("anyOf") or schema.get("oneOf")
    if not isinstance(options, list):
        return set()
    types = [value_types(option) if isinstance(option, Mapping) else set() for option in options]
    return set().union(*types) if all(types) else set()


def _json_value(text: str, types: set[str]) -> str:
    """The value as JSON: unchanged if it is JSON of an allowed type, else as a string."""
    value_text = text.strip()
    if value_text == "None" and "null" in types:
        return "null"  # as templates write it that do not say how to write values
    try:
        value = load_json(value_text)
    except MalformedCallError:
        python_value = _json_of_python(value_text) if types and "string" not in types else None
        return json.dumps(text, ensure_ascii=False) if python_value is None else python_value
    kind = _JSON_TYPES.get(type(value), "null")
    allowed = not types or "string" not in types or kind in types or (kind == "integer" and "number" in types)
    return value_text if allowed else json.dumps(text, ensure_ascii=False)


def _json_of_python(text: str) -> str | None:
    """A Python literal as JSON, for templates that write values as Python does; None if it is none."""
    try:
        value = json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
        value.encode()
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    return value


# Qwen 3 Coder: `<tool_call><function=f><parameter=k>v</parameter></function></tool_call>`, with line breaks.


_FUNCTION = "<function="


class Qwen3CoderToolParser(XMLToolParser):
    """Qwen 3 Coder, Qwen 3.5 to 3.8, Nemotron 3, Step 3.5, MiMo V2. The tags are not special tokens.

    The model sometimes forgets `<tool_call>`.

    Attributes:
      closing: The tag after the function.
    """

    openers = ("<tool_call>", _FUNCTION)
    call_markers = ("<tool_call>",)
    call_opening = "<tool_call>\n"
    call_separator = "\n"
    closing: ClassVar[str] = "</tool_call>"
    values_on_own_lines = True

    @classmethod
    def write_calls(cls, grammar: CallGrammar) -> str:
        return cls._write_functions(grammar, _FUNCTION)

    @classmethod
    def write_call_after(cls, opener: str, grammar: CallGrammar) -> str | None:
        return cls._write_functions(grammar, "") if opener == _FUNCTION else super().write_call_after(opener, grammar)

    @classmethod
    def _write_functions(cls, grammar: CallGrammar, before_name: str) -> str:
        calls = []
        for tool in grammar.tools:
            arguments = cls.write_arguments(grammar, tool, "<parameter=", ">", "</parameter>", "\n")
            begin, end = f"{before_name}{tool.name}>\n", f"</function>\n{cls.closing}"
            calls.append(grammar.rule(f"{grammar.text(begin)} {arguments} {grammar.text(end)}"))
        return grammar.choice(calls)

    def _read_call(self, opener: str) -> Reading[None]:
        if opener != _FUNCTION:
            yield from self._expect(_FUNCTION)
        name = yield from self._read_name()
        yield from self._expect(">")
        self._begin(name)
        yield from self._reader.skip_space()
        while not (yield from self._reader.take_if("</function>")):
            yield from self._expect("<parameter=")
            key = yield from self._read_text(">")
            yield from self._read_value(key, "</parameter>")
            yield from self._reader.skip_space()
        self._finish_arguments()
        yield from self._reader.skip_space()
        yield from self._reader.take_if(self.closing)
        self._end_call()


class SeedOssToolParser(Qwen3CoderToolParser):
    """Seed-OSS: the same function between `<seed:tool_call>` tags, and values without line breaks around them."""

    needs_special_tokens = True
    openers = ("<seed:tool_call>", _FUNCTION)
    call_markers = ("<seed:tool_call>",)
    dropped = ("<seed:eos>",)
    call_opening = "<seed:tool_call>\n"
    closing = "</seed:tool_call>"
    values_on_own_lines = False


# GLM 4.5 to 4.7: `<tool_call>f`, then `<arg_key>k</arg_key><arg_value>v</arg_value>` each, then `</tool_call>`.


class GLMToolParser(XMLToolParser):
    """GLM 4.5 and later, Laguna. Strings are written verbatim, other values as JSON."""

    needs_special_tokens = True
    openers = call_markers = ("<tool_call>",)
    dropped = ("<|observation|>", "<|user|>", "<|endoftext|>")
    call_opening = "<tool_call>"
    call_separator = "\n"

    @classmethod
    def write_calls(cls, grammar: CallGrammar) -> str:
        calls = []
        for tool in grammar.tools:
            arguments = cls.write_arguments(grammar, tool, "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>", "\n")
            begin, end = f"{tool.name}\n", "</tool_call>"
            calls.append(grammar.rule(f"{grammar.text(begin)} {arguments} {grammar.text(end)}"))
        return grammar.choice(calls)

    def _read_call(self, _opener: str) -> Reading[None]:
        self._begin((yield from self._read_function_name()))
        while not (yield from self._reader.take_if("</tool_call>")):
            yield from self._expect("<arg_key>")
            key = yield from self._read_text("</arg_key>")
            yield from self._expect("<arg_value>")
            yield from self._read_value(key, "</arg_value>")
            yield from self._reader.skip_space()
        self._finish_arguments()
        self._end_call()

    def _read_function_name(self) -> Reading[str]:
        return (yield from self._read_name())


class HunyuanV3ToolParser(GLMToolParser):
    """Hy3: the name ends with `<tool_sep>`, and all calls are between `<tool_calls>` tags."""

    dropped = ("<tool_calls>", "</tool_calls>")
    call_markers = ("<tool_calls>",)
    call_opening = "<tool_calls>\n"

    @classmethod
    def write_calls(cls, grammar: CallGrammar) -> str:
        calls = []
        for tool in grammar.tools:
            arguments = cls.write_arguments(grammar, tool, "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>", "\n")
            begin, end = f"<tool_call>{tool.name}<tool_sep>\n", "</tool_call>\n"
            calls.append(grammar.rule(f"{grammar.text(begin)} {arguments} {grammar.text(end)}"))
        return f"{grammar.repeated(grammar.choice(calls))} {grammar.text('</tool_calls>')}"

    def _read_function_name(self) -> Reading[str]:
        name = yield from self._read_name()
        yield from self._expect("<tool_sep>")
        yield from self._reader.skip_space()
        return name
