"""Qwen 3 Coder: `<tool_call><function=f><parameter=k>v</parameter></function></tool_call>`, with line breaks."""

from __future__ import annotations

from jaxis.parsing.text_reader import Reading
from jaxis.parsing.tool_parsers.xml_call import XMLToolParser

_FUNCTION = "<function="


class Qwen3CoderToolParser(XMLToolParser):
    """Qwen 3 Coder, Qwen 3.5. The model sometimes forgets `<tool_call>`. The tags are not special tokens."""

    openers = ("<tool_call>", _FUNCTION)
    call_markers = ("<tool_call>",)

    def _read_call(self, opener: str) -> Reading[None]:
        if opener != _FUNCTION:
            yield from self._expect(_FUNCTION)
        name = yield from self._read_name()
        yield from self._expect(">")
        self._begin(name)
        yield from self._reader.skip_space()
        while not (yield from self._reader.take_if("</function>")):
            yield from self._expect("<parameter=")
            key = yield from self._read_text(">")
            yield from self._read_value(key, "</parameter>")
            yield from self._reader.skip_space()
        self._finish_arguments()
        yield from self._reader.skip_space()
        yield from self._reader.take_if("</tool_call>")
        self._end_call()
