"""Kimi K2: `<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>` in a section."""

from __future__ import annotations

import re

from jaxis.parsing.text_reader import EndOfTextError, Reading
from jaxis.parsing.tool_parsers.call_grammar import CallGrammar
from jaxis.parsing.tool_parsers.json_call import JSONToolParser
from jaxis.parsing.tool_parsers.json_value import (
    MalformedCallError,
)

_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")
_ARGUMENTS = "<|tool_call_argument_begin|>"
_CLOSE = "<|tool_call_end|>"


class KimiToolParser(JSONToolParser):
    """Kimi K2 and K2 Thinking. A call's id contains its name and is kept: the template writes it back."""

    needs_special_tokens = True
    openers = ("<|tool_call_begin|>",)
    call_markers = ("<|tool_calls_section_begin|>",)
    dropped = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|im_end|>")
    call_opening = "<|tool_calls_section_begin|>"
    arguments_end = (_CLOSE,)

    @classmethod
    def write_calls(cls, grammar: CallGrammar) -> str:
        calls = (
            grammar.rule(
                f"{grammar.text(f'<|tool_call_begin|>functions.{tool.name}:')} /[0-9]{{1,4}}/ "
                f"{grammar.text(_ARGUMENTS)} {grammar.json_argument(tool, tool.parameters)} {grammar.text(_CLOSE)}"
            )
            for tool in grammar.tools
        )
        call = grammar.rule(grammar.choice(calls))
        return f"{grammar.repeated(call)} {grammar.text('<|tool_calls_section_end|>')}"

    def _read_call(self, opener: str) -> Reading[None]:
        pieces: list[str] = []
        marker = yield from self._reader.until((_ARGUMENTS, _CLOSE, opener), pieces.append)
        if marker is None:
            raise EndOfTextError
        call_id = "".join(pieces).strip()
        match = _ID.fullmatch(call_id)
        if marker != _ARGUMENTS or match is None:
            raise MalformedCallError
        yield from self._read_arguments(match[1], call_id)
        yield from self._reader.skip_space()
        yield from self._reader.take_if(_CLOSE)
        self._end_call()
