"""Granite 3: `<|tool_call|>[{"name": "f", "arguments": {...}}]`, or the list after `<tool_call>`."""

from __future__ import annotations

import contextlib

from jaxis.parsing.text_reader import EndOfTextError, Reading
from jaxis.parsing.tool_parsers.call_grammar import CallGrammar
from jaxis.parsing.tool_parsers.call_list import CallListToolParser


class GraniteToolParser(CallListToolParser):
    """Granite 3.0 to 3.3. Some of them write `<tool_call>`, which is not a special token, or a single object."""

    needs_special_tokens = True
    openers = call_markers = ("<|tool_call|>", "<tool_call>")
    dropped = ("<|end_of_text|>",)
    closing = ""

    @classmethod
    def opening_of(cls, grammar: CallGrammar) -> str:
        return next((opener for opener in cls.openers if grammar.has_token(opener)), cls.openers[-1])

    @classmethod
    def write_call_after(cls, opener: str, grammar: CallGrammar) -> str | None:  # noqa: ARG003
        return grammar.rule(cls.write_calls(grammar))

    def _read_call(self, opener: str) -> Reading[None]:
        yield from self._read_calls()
        yield from self._reader.skip_space()
        with contextlib.suppress(EndOfTextError):
            yield from self._reader.take_if(opener.replace("<", "</", 1))
