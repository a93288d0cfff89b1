"""Llama 3.x and 4: `{"name": "f", "parameters": {...}}` as the whole message, or after a special token."""

from __future__ import annotations

from jaxis.parsing.text_reader import Reading
from jaxis.parsing.tool_parsers.json_call import JSONToolParser


class LlamaToolParser(JSONToolParser):
    """Llama 3.1, 3.2, 3.3 and 4. Several calls are separated by `;` or white space.

    An object without a special token before it may be an answer in JSON: it is a call only if the message begins
    with it and it names a function that was offered. Python code after `<|python_tag|>` is content.
    """

    needs_special_tokens = True
    openers = ("<|python_tag|>", "<|python_start|>")
    dropped = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|python_end|>", "<|eot|>", "<|eom|>")

    def _read(self) -> Reading[None]:
        yield from self._attempt("")
        yield from super()._read()

    def _read_call(self, opener: str) -> Reading[None]:
        if opener:
            self._reader.record()  # a special token is not content
        while True:
            yield from self._read_call_object()
            self._end_call()
            yield from self._reader.skip_space()
            yield from self._reader.take_if(";")

    def _is_call(self, name: str) -> bool:
        return not self._tools or name in self._tools
