from __future__ import annotations

from jaxis.parsing.text_reader import Reading
from jaxis.parsing.tool_parsers.call_grammar import CallGrammar
from jaxis.parsing.tool_parsers.json_value import expect
from jaxis.parsing.tool_parsers.pythonic import PythonicToolParser
from jaxis.parsing.tool_parsers.whole_message import WholeMessageToolParser


class PythonListToolParser(WholeMessageToolParser, PythonicToolParser):
    """Llama 3.2, Llama 4, Gemma 3 and ToolACE: `[f(k="v"), g()]` as the whole message.

    Llama 4 may write special tokens around it.
    """

    bracket = "["
    openers = ("<|python_start|>", "<|python_tag|>")
    dropped = ("<|python_end|>", "<|eot|>", "<|eom|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")

    @classmethod
    def write_calls(cls, grammar: CallGrammar) -> str:
        return grammar.rule(f'"[" {cls.write_list(grammar)} "]"')

    def _read_calls(self) -> Reading[None]:
        yield from expect(self._reader, "[")
        yield from self._read_listed_calls(self._read_python_call)
