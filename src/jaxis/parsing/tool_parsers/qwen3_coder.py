"""Qwen 3 Coder: `<tool_call><function=f><parameter=k>v</parameter></function></tool_call>`, with line breaks."""

from __future__ import annotations

from typing import ClassVar

from jaxis.parsing.text_reader import Reading
from jaxis.parsing.tool_parsers.xml_call import XMLToolParser

_FUNCTION = "<function="


class Qwen3CoderToolParser(XMLToolParser):
    """Qwen 3 Coder, Qwen 3.5 to 3.8, Nemotron 3, Step 3.5, MiMo V2. The tags are not special tokens.

    The model sometimes forgets `<tool_call>`.

    Attributes:
      closing: The tag after the function.
    """

    openers = ("<tool_call>", _FUNCTION)
    call_markers = ("<tool_call>",)
    closing: ClassVar[str] = "</tool_call>"
    values_on_own_lines = True

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
        yield from self._reader.take_if(self.closing)
        self._end_call()


class SeedOssToolParser(Qwen3CoderToolParser):
    """Seed-OSS: the same function between `<seed:tool_call>` tags, and values without line breaks around them."""

    needs_special_tokens = True
    openers = ("<seed:tool_call>", _FUNCTION)
    call_markers = ("<seed:tool_call>",)
    dropped = ("<seed:eos>",)
    closing = "</seed:tool_call>"
    values_on_own_lines = False
