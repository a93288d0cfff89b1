from __future__ import annotations

from typing import Any

from jaxis.parsing.text_reader import Reading
from jaxis.parsing.tool_parsers.call_grammar import CallGrammar, moved
from jaxis.parsing.tool_parsers.call_list import CallListToolParser
from jaxis.parsing.tool_parsers.json_value import expect, read_json_string


class ApertusToolParser(CallListToolParser):
    """Apertus: `<|tools_prefix|>[{"f": {...}}]<|tools_suffix|>`; a call's one key is the function's name."""

    needs_special_tokens = True
    openers = call_markers = ("<|tools_prefix|>",)
    dropped = ("<|tools_suffix|>", "<|assistant_end|>")
    call_opening = "<|tools_prefix|>"
    closing = "<|tools_suffix|>"

    @classmethod
    def call_schemas(cls, grammar: CallGrammar) -> list[dict[str, Any]]:
        return [
            {
                "type": "object",
                "properties": {tool.name: moved(tool.parameters, f"#/properties/{tool.name}")},
                "required": [tool.name],
                "additionalProperties": False,
            }
            for tool in grammar.tools
        ]

    def _read_object(self) -> Reading[None]:
        yield from expect(self._reader, "{")
        name = yield from read_json_string(self._reader)
        yield from expect(self._reader, ":")
        yield from self._read_arguments(name)
        yield from expect(self._reader, "}")
