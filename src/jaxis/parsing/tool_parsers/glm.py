"""GLM 4.5 to 4.7: `<tool_call>f`, then `<arg_key>k</arg_key><arg_value>v</arg_value>` each, then `</tool_call>`."""

from __future__ import annotations

from jaxis.parsing.text_reader import Reading
from jaxis.parsing.tool_parsers.xml_call import XMLToolParser


class GLMToolParser(XMLToolParser):
    """Strings are written verbatim, other values as JSON."""

    needs_special_tokens = True
    openers = call_markers = ("<tool_call>",)
    dropped = ("<|observation|>", "<|user|>", "<|endoftext|>")

    def _read_call(self, _opener: str) -> Reading[None]:
        self._begin((yield from self._read_name()))
        while not (yield from self._reader.take_if("</tool_call>")):
            yield from self._expect("<arg_key>")
            key = yield from self._read_text("</arg_key>")
            yield from self._expect("<arg_value>")
            yield from self._read_value(key, "</arg_value>")
            yield from self._reader.skip_space()
        self._finish_arguments()
        self._end_call()
