"""DeepSeek V3.2: `<｜DSML｜invoke name="f">`, then for each argument
`<｜DSML｜parameter name="k" string="true">v</｜DSML｜parameter>`, then `</｜DSML｜invoke>`.
"""

# ruff: noqa: RUF001 (the bars are the format's)

from __future__ import annotations

from jaxis.parsing.text_reader import Reading
from jaxis.parsing.tool_parsers.xml_call import XMLToolParser


class DeepSeekV32ToolParser(XMLToolParser):
    """Each parameter states whether its value is a verbatim string or JSON."""

    needs_special_tokens = True
    openers = ("<｜DSML｜invoke ",)
    dropped = ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", "<｜end▁of▁sentence｜>")

    def _read_call(self, _opener: str) -> Reading[None]:
        yield from self._expect('name="')
        name = yield from self._read_name()
        yield from self._expect('">')
        self._begin(name)
        yield from self._reader.skip_space()
        while not (yield from self._reader.take_if("</｜DSML｜invoke>")):
            yield from self._expect('<｜DSML｜parameter name="')
            key = yield from self._read_text('"')
            yield from self._expect('string="')
            is_string = yield from self._reader.take_if("true")
            if not is_string:
                yield from self._expect("false")
            yield from self._expect('">')
            yield from self._read_value(key, "</｜DSML｜parameter>", is_string=is_string)
            yield from self._reader.skip_space()
        self._finish_arguments()
        self._end_call()
