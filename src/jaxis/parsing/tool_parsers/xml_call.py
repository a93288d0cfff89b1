from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from jaxis.parsing.json_schema import ANY_TYPE, admits, property_schema, types
from jaxis.parsing.text_reader import EndOfTextError, Reading
from jaxis.parsing.tool_parsers.call_grammar import CallGrammar, literal, tool_arguments
from jaxis.parsing.tool_parsers.json_value import MalformedCallError, ValueScanner, load_json
from jaxis.parsing.tool_parsers.tagged_values import TaggedValueParser
from jaxis.parsing.tool_parsers.tools import FunctionTool


class XMLToolParser(TaggedValueParser):
    """Converts arguments between tags to one JSON object, with the types that the function's schema gives.

    With `values_on_own_lines`, templates put a line break before and after a value, which are not part of it.
    `argument_end` is what they write after an argument.
    """

    values_on_own_lines: ClassVar[bool] = False
    argument_end: ClassVar[str] = "\n"
    _is_string: bool | None = None  # of the next value, if its tag says so; None consults the schema

    @classmethod
    def write_arguments(cls, grammar: CallGrammar, tool: FunctionTool) -> str:
        """Returns all of a function's arguments; optional ones may be missing.

        A string is written verbatim, anything else as JSON. A value that may be either is read as JSON.
        """
        given = tool_arguments(tool)
        beginnings = {key: f"{cls.argument_tags[0]}{key}{cls.argument_tags[1]}" for key, *_ in given}
        arguments: list[str] = []
        for key, schema, is_required in given:
            others = [beginning for name, beginning in beginnings.items() if name != key]
            options = [cls._write_argument(grammar, tool, key, part, others) for part in cls._typed(schema, tool)]
            rule = grammar.rule(f"{grammar.choice(options)} {grammar.text(cls.argument_end)}")
            arguments.append(rule if is_required else f"{rule}?")
        return " ".join(arguments)

    @classmethod
    def _write_argument(
        cls, grammar: CallGrammar, tool: FunctionTool, key: str, schema: Mapping[str, Any], others: Sequence[str]
    ) -> str:
        """Returns an argument, whose string has no beginnings of others."""
        kinds = types(schema, tool.parameters)
        line_break = "\n" if cls.values_on_own_lines else ""
        before = f"{grammar.text(cls.argument_tags[0])} {literal(key)}"
        before = f"{before} {grammar.text(cls._after_name(kinds) + line_break)}"
        if kinds == {"string"}:
            value = grammar.verbatim_string(
                tool, schema, cls.value_end, break_before_end=cls.values_on_own_lines, without=others
            )
        else:
            value = f"{grammar.json_argument(tool, schema)} {grammar.text(line_break + cls.value_end)}"
        return f"{before} {value}"

    @classmethod
    def _typed(cls, schema: Mapping[str, Any], _tool: FunctionTool) -> list[Mapping[str, Any]]:
        """Returns schemas that are written in different ways, of which a value has one."""
        return [schema]

    @classmethod
    def _after_name(cls, _kinds: frozenset[str]) -> str:
        """Returns the text between an argument's name and its value, which has one of these types."""
        return cls.argument_tags[1]

    def _read_call_from_name(self) -> Reading[None]:
        """Reads a call from its name on, including the tag that closes it."""
        name = yield from self._read_name()
        if self.call_tags[1]:
            yield from self._expect(self.call_tags[1])
        yield from self._begin(name)
        yield from self._read_arguments()
        self._add_arguments("}" if self._given else "{}")
        self._arguments_done = True

    def _expect(self, literal: str) -> Reading[None]:
        if not (yield from self._reader.skip_space()):
            raise EndOfTextError
        if not (yield from self._reader.take_if(literal)):
            raise MalformedCallError

    def _read_value(self, key: str) -> Reading[None]:
        schema = property_schema(self._parameters, key, self._parameters)
        allowed = types(schema, self._parameters)
        self._add_arguments(f"{', ' if self._given else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        self._given.append(key)
        if self._is_string or (self._is_string is None and allowed == {"string"}):
            self._add_arguments('"')
            yield from self._read_string()
            self._add_arguments('"')
            return
        pieces, scanner, num_scanned = [""], ValueScanner(), 0

        def in_string() -> bool:
            nonlocal num_scanned
            text = "".join(pieces[num_scanned:])
            scanner.scan(text if num_scanned else text.lstrip())
            num_scanned = len(pieces)
            return scanner.in_string

        yield from self._read_value_text(pieces.append, in_string)
        text = "".join(pieces)
        if self.values_on_own_lines:
            text = text.removeprefix("\n").removesuffix("\n")
        self._add_arguments(self._json_value(text, schema))

    def _read_string(self) -> Reading[None]:
        """Passes a string on as it arrives, minus the line breaks around it."""
        held = ""

        def take(text: str) -> None:
            nonlocal held
            text = held + text
            held = "\n" if self.values_on_own_lines and text.endswith("\n") else ""
            self._add_arguments(escape(text.removesuffix(held)))

        if self.values_on_own_lines:
            yield from self._reader.take_if("\n")
        yield from self._read_value_text(take)

    def _json_value(self, text: str, schema: object) -> str:
        """Returns the value as JSON: unchanged if the schema admits it as JSON, or admits no such string."""
        allowed, value_text = types(schema, self._parameters), text.strip()
        if value_text == "None" and "null" in allowed != ANY_TYPE:
            return "null"  # as templates write it that do not say how to write values
        try:
            value = load_json(value_text)
        except MalformedCallError:
            python_value = _json_of_python(value_text) if "string" not in allowed else None
            return json.dumps(text, ensure_ascii=False) if python_value is None else python_value
        is_json = admits(schema, self._parameters, value) or not admits(schema, self._parameters, text)
        return value_text if is_json else json.dumps(text, ensure_ascii=False)

    @property
    def _parameters(self) -> Mapping[str, Any]:
        tool = self._tools.get(self._name)
        return tool.parameters if tool else {}


def escape(text: str) -> str:
    """Returns the text as part of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _json_of_python(text: str) -> str | None:
    """Returns a Python literal as JSON, for templates that write values as Python does; None if it is no literal."""
    try:
        value = json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
        value.encode()
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    return value
