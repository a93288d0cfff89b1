"""DeepSeek V3, R1 and V3.1: calls between special tokens.

V3 and R1: `<｜tool▁call▁begin｜>function<｜tool▁sep｜>f`, a line break, the arguments as a fenced block of JSON, and
`<｜tool▁call▁end｜>`. V3.1: `<｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`.
"""

from __future__ import annotations

from jaxis.parsing.text_reader import EndOfTextError, Reading
from jaxis.parsing.tool_parsers.call_grammar import CallGrammar, literal
from jaxis.parsing.tool_parsers.json_call import JSONToolParser
from jaxis.parsing.tool_parsers.json_value import (
    MalformedCallError,
)

_SEPARATOR = "<｜tool▁sep｜>"  # noqa: RUF001
_CALLS_CLOSE = "<｜tool▁call▁end｜>"  # noqa: RUF001


class DeepSeekToolParser(JSONToolParser):
    """Parses both formats: in the newer one the arguments follow the separator directly."""

    needs_special_tokens = True
    openers = ("<｜tool▁call▁begin｜>",)  # noqa: RUF001
    dropped = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜end▁of▁sentence｜>")  # noqa: RUF001
    call_markers = ("<｜tool▁calls▁begin｜>",)  # noqa: RUF001
    call_opening = "<｜tool▁calls▁begin｜>"  # noqa: RUF001
    arguments_end = ("```", _CALLS_CLOSE)

    @classmethod
    def write_calls(cls, grammar: CallGrammar) -> str:
        calls: list[str] = []
        for tool in grammar.tools:
            arguments = grammar.json_argument(tool, tool.parameters)
            for before, after in (
                (f"function{_SEPARATOR}{tool.name}\n```json\n", f"\n```{_CALLS_CLOSE}"),
                (tool.name + _SEPARATOR, _CALLS_CLOSE),
            ):
                calls.append(f"{grammar.text(cls.openers[0] + before)} {arguments} {grammar.text(after)}")
        separator = grammar.rule(literal("\n") + "?")
        calls_end = grammar.text("<｜tool▁calls▁end｜>")  # noqa: RUF001
        return f"{grammar.repeated(grammar.rule(grammar.choice(calls)), separator)} {calls_end}"

    def _read_call(self, _opener: str) -> Reading[None]:
        name = yield from self._read_up_to(_SEPARATOR)
        fenced = (yield from self._reader.peek()) not in ("{", "") and not (yield from self._reader.comes(_CALLS_CLOSE))
        if fenced:
            name = yield from self._read_up_to("\n")
            yield from self._reader.skip_space()
            yield from self._reader.take_if("```json")
        yield from self._read_arguments(name)
        yield from self._reader.skip_space()
        if fenced:
            yield from self._reader.take_if("```")
        yield from self._reader.take_if(_CALLS_CLOSE)
        self._end_call()

    def _read_up_to(self, end: str) -> Reading[str]:
        pieces: list[str] = []
        marker = yield from self._reader.until((end, _CALLS_CLOSE, *self.openers), pieces.append)
        if marker is None:
            raise EndOfTextError
        if marker != end:
            raise MalformedCallError
        return "".join(pieces).strip()
