"""MiniMax M3: calls of nested elements, each tag after a mark that no text has.

`<tool_call>`, `<invoke name="f">`, an element for each argument, `</invoke>`, `</tool_call>`, all after the mark. An
object's members are elements in its element, a list's items elements named `item`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jaxis.parsing.json_schema import conjuncts, property_schema, types
from jaxis.parsing.text_reader import EndOfTextError, Reading
from jaxis.parsing.tool_parsers.call_grammar import CallGrammar, UnwritableCallError, tool_arguments
from jaxis.parsing.tool_parsers.invocations import InvocationsToolParser
from jaxis.parsing.tool_parsers.json_value import MAX_DEPTH, MalformedCallError
from jaxis.parsing.tool_parsers.tools import FunctionTool
from jaxis.parsing.tool_parsers.xml_call import escape

_MARK = "]<]minimax[>["
_LIST_KEYS = frozenset({"type", "items", "title", "description", "default"})


class MiniMaxM3ToolParser(InvocationsToolParser):
    openers = call_markers = (f"{_MARK}<tool_call>",)
    dropped = (f"{_MARK}</tool_call>", "[e~[")
    call_opening = f"{_MARK}<tool_call>\n"
    argument_tags = (f"{_MARK}<", ">")
    value_end = f"{_MARK}</"
    call_tags = (f'{_MARK}<invoke name="', '">')
    call_end = f"{_MARK}</invoke>"
    section_tags = (f"{_MARK}<tool_call>", f"{_MARK}</tool_call>")

    @classmethod
    def write_calls(cls, grammar: CallGrammar) -> str:
        call = grammar.choice(cls.write_invocation(grammar, tool) for tool in grammar.tools)
        calls = grammar.repeated(call, grammar.text("\n"))
        return " ".join((calls, grammar.text("\n" + cls.section_tags[1])))

    @classmethod
    def write_arguments(cls, grammar: CallGrammar, tool: FunctionTool) -> str:
        return cls._write_members(grammar, tool, tool.parameters, 0)

    @classmethod
    def _write_members(cls, grammar: CallGrammar, tool: FunctionTool, schema: Mapping[str, Any], depth: int) -> str:
        members = [
            grammar.rule(cls._write_element(grammar, tool, key, member, depth + 1)) + ("" if is_required else "?")
            for key, member, is_required in tool_arguments(tool, schema)
        ]
        if depth and not members:
            raise UnwritableCallError("an object of any members")
        return " ".join(members) or '""'

    @classmethod
    def _write_element(
        cls, grammar: CallGrammar, tool: FunctionTool, name: str, schema: Mapping[str, Any], depth: int
    ) -> str:
        """Returns an element. Raises UnwritableCallError for a list or an object whose schema says too little."""
        kinds = types(schema, tool.parameters)
        begin, end = grammar.text(f"{_MARK}<{name}>"), grammar.text(f"{_MARK}</{name}>")
        if kinds == {"string"}:
            return f"{begin} {grammar.verbatim_string(tool, schema, _MARK)} {grammar.text(f'</{name}>')}"
        if not kinds & {"array", "object"}:
            return f"{begin} {grammar.json_argument(tool, schema)} {end}"
        if len(kinds) > 1 or depth > MAX_DEPTH:
            raise UnwritableCallError("a list or an object beside other types")
        if kinds == {"object"}:
            return f"{begin} {cls._write_members(grammar, tool, schema, depth)} {end}"
        items = _items(schema, tool.parameters)
        if not isinstance(items, Mapping) or schema.keys() - _LIST_KEYS:
            raise UnwritableCallError("a list of any items")
        item = grammar.rule(cls._write_element(grammar, tool, "item", items, depth + 1))
        return f"{begin} {item}* {end}"

    def _read_call(self, _opener: str) -> Reading[None]:
        yield from self._read_invocations()

    def _read_arguments(self) -> Reading[None]:
        while True:
            if not (yield from self._reader.skip_space()):
                raise EndOfTextError
            if (yield from self._reader.take_if(self.call_end)):
                return
            yield from self._expect(self.argument_tags[0])
            yield from self._read_argument((yield from self._read_tag()))

    def _read_argument(self, key: str) -> Reading[None]:
        """Reads an argument's element after its tag; a string is passed on as it arrives."""
        if key in self._given:
            raise MalformedCallError
        schema = property_schema(self._parameters, key, self._parameters)
        self._add_arguments(f"{', ' if self._given else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        self._given.append(key)
        if types(schema, self._parameters) != {"string"}:
            self._add_arguments((yield from self._read_element(key, schema, 1)))
            return
        self._add_arguments('"')
        if (yield from self._reader.until((_MARK,), lambda text: self._add_arguments(escape(text)))) is None:
            raise EndOfTextError
        if not (yield from self._reader.take_if(f"</{key}>")):
            raise MalformedCallError
        self._add_arguments('"')

    def _read_tag(self) -> Reading[str]:
        name = yield from self._reader.take_while(lambda text: text[-1] not in "<>\n")
        if not (yield from self._reader.peek()):
            raise EndOfTextError
        if not name or name.startswith("/") or not (yield from self._reader.take_if(">")):
            raise MalformedCallError
        return name

    def _read_element(self, name: str, schema: object, depth: int) -> Reading[str]:
        """Reads an element after its tag, with the tag that closes it; returns its value as JSON."""
        if depth > MAX_DEPTH:
            raise MalformedCallError
        kinds = types(schema, self._parameters)
        pieces: list[str] = []
        members: list[tuple[str, str]] = []
        while (yield from self._reader.until((_MARK,), pieces.append)) is not None:
            if (yield from self._reader.take_if(f"</{name}>")):
                return self._joined("".join(pieces), members, kinds, schema)
            if not (yield from self._reader.take_if("<")):
                raise MalformedCallError
            key = yield from self._read_tag()
            is_item = "array" in kinds and (key == "item" or "object" not in kinds)
            of_member = _items(schema, self._parameters) if is_item else None
            if not is_item:
                of_member = property_schema(schema, key, self._parameters)
            members.append((key, (yield from self._read_element(key, of_member, depth + 1))))
        raise EndOfTextError

    def _joined(self, text: str, members: list[tuple[str, str]], kinds: frozenset[str], schema: object) -> str:
        if not members:
            if not text.strip() and "string" not in kinds and kinds & {"array", "object"}:
                return "[]" if "array" in kinds else "{}"
            return self._json_value(text, schema)
        keys = [key for key, _ in members]
        if "array" in kinds and ("object" not in kinds or set(keys) == {"item"}):
            value = f"[{', '.join(value for _, value in members)}]"
        else:
            value = f"{{{', '.join(f'{json.dumps(key, ensure_ascii=False)}: {value}' for key, value in members)}}}"
            if len(set(keys)) < len(keys):
                raise MalformedCallError
        if text.strip():
            raise MalformedCallError
        return value


def _items(schema: object, root: object) -> Any:
    """Returns the schema of a list's items; None if the list's schema says nothing of them."""
    for part in conjuncts(schema, root):
        if isinstance(part, Mapping):
            if "items" in part:
                return part["items"]
            for option in (*part.get("anyOf", ()), *part.get("oneOf", ())):
                if (found := _items(option, root)) is not None:
                    return found
    return None
