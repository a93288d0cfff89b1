from __future__ import annotations

import contextlib
from typing import ClassVar

from jaxis.parsing.text_reader import EndOfTextError, Reading
from jaxis.parsing.tool_parsers.call_grammar import CallGrammar
from jaxis.parsing.tool_parsers.json_call import JSONToolParser


class CallListToolParser(JSONToolParser):
    """A list of calls in JSON between markers, as of Phi 4 mini; `closing` is the text after the list."""

    needs_special_tokens = True
    openers = call_markers = ("<|tool_call|>",)
    dropped = ("<|/tool_call|>", "<|end|>", "<|endoftext|>")
    call_opening = "<|tool_call|>"
    closing: ClassVar[str] = "<|/tool_call|>"

    @classmethod
    def write_calls(cls, grammar: CallGrammar) -> str:
        return f"{grammar.json_calls(cls.call_schemas(grammar))} {grammar.text(cls.closing)}"

    def _read_call(self, _opener: str) -> Reading[None]:
        yield from self._read_call_list()


class HunyuanToolParser(CallListToolParser):
    """Hunyuan A13B and the dense ones: `<tool_calls>[...]</tool_calls>`. The tags are not special tokens."""

    needs_special_tokens = False
    openers = call_markers = ("<tool_calls>",)
    dropped = ()
    call_opening = "<tool_calls>"
    closing = "</tool_calls>"

    def _read_call(self, _opener: str) -> Reading[None]:
        yield from self._read_call_list()
        yield from self._reader.skip_space()
        with contextlib.suppress(EndOfTextError):
            yield from self._reader.take_if(self.closing)


class NemotronNanoV2ToolParser(HunyuanToolParser):
    """Nemotron Nano 2: `<TOOLCALL>[...]</TOOLCALL>`."""

    openers = call_markers = ("<TOOLCALL>",)
    call_opening = "<TOOLCALL>"
    closing = "</TOOLCALL>"


class BareCallListToolParser(JSONToolParser):
    """A list that is the whole message, as `required_tools_schema` makes a model write it."""

    def _read(self) -> Reading[None]:
        yield from self._attempt("")
        yield from super()._read()

    def _read_call(self, _opener: str) -> Reading[None]:
        yield from self._read_call_list()
