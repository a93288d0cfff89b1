"""Kimi K3: an answer has channels between special tokens, of which one has calls with arguments of named types.

`<|open|>tools<|sep|>`, `<|open|>call tool="f" index="1"<|sep|>`, for each argument
`<|open|>argument key="k" type="string"<|sep|>v<|close|>argument<|sep|>`, and tags that close all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxis.parsing.json_schema import types
from jaxis.parsing.text_reader import EndOfTextError, Reading
from jaxis.parsing.tool_parsers.call_grammar import ANY_TEXT, CallGrammar
from jaxis.parsing.tool_parsers.invocations import InvocationsToolParser
from jaxis.parsing.tool_parsers.tools import FunctionTool

KIMI_K3_RESPONSE, _RESPONSE_END = "<|open|>response<|sep|>", "<|close|>response<|sep|>"
KIMI_K3_TOOLS, _TOOLS_END = "<|open|>tools<|sep|>", "<|close|>tools<|sep|>"
KIMI_K3_DROPPED = (KIMI_K3_RESPONSE, _RESPONSE_END, "<|close|>message<|sep|>", "<|end_of_msg|>")


class KimiK3ToolParser(InvocationsToolParser):
    openers = ("<|open|>call ",)
    call_markers = (KIMI_K3_TOOLS,)
    dropped = (KIMI_K3_TOOLS, _TOOLS_END, *KIMI_K3_DROPPED)
    argument_tags = ('<|open|>argument key="', '"')
    argument_end = ""
    value_end = "<|close|>argument<|sep|>"
    call_tags = ('<|open|>call tool="', '"<|sep|>')
    call_end = "<|close|>call<|sep|>"
    section_tags = (KIMI_K3_TOOLS, _TOOLS_END)

    @classmethod
    def write_answer(cls, grammar: CallGrammar, answer: str | None, *, must_call: bool) -> str:
        """Returns an answer from within its channel on, and calls in theirs."""
        end = grammar.text(_RESPONSE_END)
        calls = grammar.rule(f"{end} {grammar.text(KIMI_K3_TOOLS)} {cls.write_calls(grammar)}")
        if must_call:
            return calls
        if answer is not None:
            return f"({answer} | {calls})"
        return f"{ANY_TEXT} ({calls} | {end})?"

    @classmethod
    def write_calls(cls, grammar: CallGrammar) -> str:
        calls = []
        for tool in grammar.tools:
            before = grammar.text(f'{cls.call_tags[0]}{tool.name}" index="')
            rest = f"{cls.write_arguments(grammar, tool)} {grammar.text(cls.call_end)}"
            calls.append(grammar.rule(f"{before} /[0-9]{{1,4}}/ {grammar.text(cls.call_tags[1])} {rest}"))
        return f"{grammar.repeated(grammar.rule(grammar.choice(calls)))} {grammar.text(_TOOLS_END)}"

    @classmethod
    def _typed(cls, schema: Mapping[str, Any], tool: FunctionTool) -> list[Mapping[str, Any]]:
        kinds = sorted({"number" if kind == "integer" else kind for kind in types(schema, tool.parameters)})
        return [schema] if len(kinds) == 1 else [{"allOf": [schema, {"type": kind}]} for kind in kinds]

    @classmethod
    def _after_name(cls, kinds: frozenset[str]) -> str:
        return f'" type="{"number" if "integer" in kinds else min(kinds)}"<|sep|>'

    def _read_call(self, _opener: str) -> Reading[None]:
        yield from self._expect('tool="')
        yield from self._read_invocation()

    def _read_name(self) -> Reading[str]:
        name = yield from super()._read_name()
        yield from self._expect('" index="')
        yield from self._reader.take_while(str.isdecimal)
        return name

    def _read_argument_name(self) -> Reading[str | None]:
        name = yield from super()._read_argument_name()
        if not (yield from self._reader.skip_space()):
            raise EndOfTextError
        if name is None or not (yield from self._reader.take_if('type="')):
            return None
        self._is_string = (yield from self._reader.take_while(str.isalpha)) == "string"
        is_closed = yield from self._reader.take_if('"<|sep|>')
        return name.replace("&quot;", '"').replace("&amp;", "&") if is_closed else None
