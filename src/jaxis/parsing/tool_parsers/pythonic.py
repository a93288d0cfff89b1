from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from jaxis.parsing.json_schema import conjuncts, type_of, types
from jaxis.parsing.text_reader import EndOfTextError, Reading
from jaxis.parsing.tool_parsers.call_grammar import CallGrammar, UnwritableCallError, literal, moved, tool_arguments
from jaxis.parsing.tool_parsers.json_call import JSONToolParser
from jaxis.parsing.tool_parsers.json_value import MalformedCallError, expect
from jaxis.parsing.tool_parsers.python_values import PythonValueReader
from jaxis.parsing.tool_parsers.tools import FunctionTool

_KEYWORD = re.compile(r"[^\W\d]\w*")
_FENCE = "```"
_SINGLE_QUOTED = r"/'([^'\\\x00-\x1f]|\\['\\nrt])*'/"
_ARRAY_KEYS = {"type", "items", "minItems", "maxItems"}
_SCALARS = (str, int, float, type(None))


class PythonicToolParser(JSONToolParser):
    """Reads a call in Python's notation, `f(k="v", n=1)`; all arguments must be given by name."""

    @classmethod
    def write_python_call(cls, grammar: CallGrammar) -> str:
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
        """Returns calls in a list, without its brackets."""
        return grammar.repeated(cls.write_python_call(grammar), literal(", "))

    @classmethod
    def _write_value(cls, grammar: CallGrammar, tool: FunctionTool, schema: Mapping[str, Any]) -> str:
        """Returns a literal. If its schema is not simple, the value is JSON, which models read and write too."""
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
        return name

    def _read_keyword(self) -> Reading[str]:
        keyword = yield from self._reader.take_while(lambda text: _KEYWORD.fullmatch(text) is not None)
        yield from expect(self._reader, "=")
        if not keyword:
            raise MalformedCallError
        return keyword


def _scalar(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a scalar's schema as one mapping if `$ref` or `allOf` leads to one without alternatives."""
    parts = [part for part in conjuncts(schema, root) if part is not False]
    is_scalar = len(parts) == 1 and not types(schema, root) & {"array", "object"}
    return parts[0] if is_scalar and not {"anyOf", "oneOf"} & parts[0].keys() else schema


def _has_type(value: object, schema: Mapping[str, Any]) -> bool:
    return type_of(value) in types({"type": schema.get("type")}, schema)


def _spellings(value: object) -> Iterable[str]:
    """Returns a string, number, boolean or None in Python's notation; strings with either quotation mark."""
    is_constant = value is None or isinstance(value, bool)
    spellings = [repr(value)] if is_constant else [json.dumps(value, ensure_ascii=False), repr(value)]
    return map(literal, dict.fromkeys(spellings))
