"""GLM 4.5 to 4.7: `<tool_call>f`, then `<arg_key>k</arg_key><arg_value>v</arg_value>` each, then `</tool_call>`."""

from __future__ import annotations

from jaxis.parsing.text_reader import Reading
from jaxis.parsing.tool_parsers.xml_call import XMLToolParser


class GLMToolParser(XMLToolParser):
    """GLM 4.5 and later, Laguna. Strings are written verbatim, other values as JSON."""

    needs_special_tokens = True
    openers = call_markers = ("<tool_call>",)
    dropped = ("<|observation|>", "<|user|>", "<|endoftext|>")

    def _read_call(self, _opener: str) -> Reading[None]:
        self._begin((yield from self._read_function_name()))
        while not (yield from self._reader.take_if("</tool_call>")):
            yield from self._expect("<arg_key>")
            key = yield from self._read_text("</arg_key>")
            yield from self._expect("<arg_value>")
            yield from self._read_value(key, "</arg_value>")
            yield from self._reader.skip_space()
        self._finish_arguments()
        self._end_call()

    def _read_function_name(self) -> Reading[str]:
        return (yield from self._read_name())


class HunyuanV3ToolParser(GLMToolParser):
    """Hy3: the name ends with `<tool_sep>`, and all calls are between `<tool_calls>` tags."""

    dropped = ("<tool_calls>", "</tool_calls>")
    call_markers = ("<tool_calls>",)

    def _read_function_name(self) -> Reading[str]:
        name = yield from self._read_name()
        yield from self._expect("<tool_sep>")
        yield from self._reader.skip_space()
        return name
