"""Llama 3.x and 4: `{"name": "f", "parameters": {...}}` as the whole message."""

from __future__ import annotations

from jaxis.parsing.text_reader import Reading
from jaxis.parsing.tool_parsers.call_grammar import CallGrammar
from jaxis.parsing.tool_parsers.whole_message import WholeMessageToolParser


class LlamaToolParser(WholeMessageToolParser):
    """Llama 3.1, 3.2, 3.3 and 4. Several calls are separated by `;` or white space.

    Python code after `<|python_tag|>` is content.
    """

    needs_special_tokens = True
    bracket = "{"
    openers = ("<|python_tag|>", "<|python_start|>")
    dropped = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|python_end|>", "<|eot|>", "<|eom|>")
    arguments_key = "parameters"

    @classmethod
    def write_calls(cls, grammar: CallGrammar) -> str:
        return grammar.json_call(cls.call_schemas(grammar))

    def _read_calls(self) -> Reading[None]:
        while True:
            yield from self._read_call_object()
            self._end_call()
            yield from self._reader.skip_space()
            yield from self._reader.take_if(";")
