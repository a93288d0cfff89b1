from __future__ import annotations

from jaxis.parsing.text_reader import Reading
from jaxis.parsing.tool_parsers.call_grammar import CallGrammar
from jaxis.parsing.tool_parsers.json_value import expect
from jaxis.parsing.tool_parsers.pythonic import PythonicToolParser


class LFM2ToolParser(PythonicToolParser):
    """LFM2 and LFM2.5: `<|tool_call_start|>[f(k="v"), g()]<|tool_call_end|>`, or the list in JSON if asked for it."""

    needs_special_tokens = True
    openers = call_markers = ("<|tool_call_start|>",)
    dropped = ("<|tool_call_end|>", "<|im_end|>")
    call_opening = "<|tool_call_start|>["

    @classmethod
    def write_calls(cls, grammar: CallGrammar) -> str:
        return f"{cls.write_list(grammar)} {grammar.text(']<|tool_call_end|>')}"

    def _read_call(self, _opener: str) -> Reading[None]:
        yield from expect(self._reader, "[")
        in_json = (yield from self._reader.skip_space()) == "{"
        yield from self._read_listed_calls(self._read_call_object if in_json else self._read_python_call)
