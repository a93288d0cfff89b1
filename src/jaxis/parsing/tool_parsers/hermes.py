"""Hermes, Qwen, LongCat: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, once for each call."""

from __future__ import annotations

from typing import ClassVar

from jaxis.parsing.text_reader import Reading
from jaxis.parsing.tool_parsers.call_grammar import CallGrammar
from jaxis.parsing.tool_parsers.json_call import JSONToolParser


class HermesToolParser(JSONToolParser):
    """Hermes 2 and 3, Qwen 2.5, Qwen 3. The tags are not special tokens."""

    openers = call_markers = ("<tool_call>",)
    call_opening = "<tool_call>\n"
    call_separator = "\n"
    call_end: ClassVar[str] = "</tool_call>"

    @classmethod
    def write_calls(cls, grammar: CallGrammar) -> str:
        return " ".join((grammar.json_call(cls.call_schemas(grammar)), grammar.text(f"\n{cls.call_end}")))

    def _read_call(self, _opener: str) -> Reading[None]:
        yield from self._read_call_object()
        yield from self._reader.skip_space()
        yield from self._reader.take_if(self.call_end)
        self._end_call()


class LongcatToolParser(HermesToolParser):
    """LongCat-Flash, with tags of its own name."""

    openers = call_markers = ("<longcat_tool_call>",)
    call_opening = "<longcat_tool_call>\n"
    call_end = "</longcat_tool_call>"
