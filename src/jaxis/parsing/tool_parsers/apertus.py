"""Apertus: `<|tools_prefix|>[{"f": {...}}]<|tools_suffix|>`."""

from __future__ import annotations

from jaxis.parsing.text_reader import Reading
from jaxis.parsing.tool_parsers.json_call import JSONToolParser
from jaxis.parsing.tool_parsers.json_value import expect, read_json_string


class ApertusToolParser(JSONToolParser):
    """A call is an object with one key, the function's name."""

    needs_special_tokens = True
    openers = call_markers = ("<|tools_prefix|>",)
    dropped = ("<|tools_suffix|>", "<|assistant_end|>")

    def _read_call(self, _opener: str) -> Reading[None]:
        yield from self._read_call_list()

    def _read_object(self) -> Reading[None]:
        yield from expect(self._reader, "{")
        name = yield from read_json_string(self._reader)
        yield from expect(self._reader, ":")
        yield from self._read_arguments(name)
        yield from expect(self._reader, "}")
