"""Phi 4 mini: `<|tool_call|>[{"name": "f", "arguments": {...}}]<|/tool_call|>`."""

from __future__ import annotations

from jaxis.parsing.text_reader import Reading
from jaxis.parsing.tool_parsers.json_call import JSONToolParser


class CallListToolParser(JSONToolParser):
    """Phi 4 mini."""

    needs_special_tokens = True
    openers = call_markers = ("<|tool_call|>",)
    dropped = ("<|/tool_call|>", "<|end|>", "<|endoftext|>")

    def _read_call(self, _opener: str) -> Reading[None]:
        yield from self._read_call_list()


class BareCallListToolParser(JSONToolParser):
    """A list that is the whole message, as `required_tools_schema` makes a model write it."""

    def _read(self) -> Reading[None]:
        yield from self._attempt("")
        yield from super()._read()

    def _read_call(self, _opener: str) -> Reading[None]:
        yield from self._read_call_list()
