from __future__ import annotations

import contextlib

from jaxis.parsing.text_reader import EndOfTextError, Reading
from jaxis.parsing.tool_parsers.call_grammar import CallGrammar, literal
from jaxis.parsing.tool_parsers.json_value import expect
from jaxis.parsing.tool_parsers.pythonic import _FENCE, PythonicToolParser


class Gemma3ToolParser(PythonicToolParser):
    """Gemma 3, asked for code: calls in a block that is fenced as `tool_code`, one a line, or in a list.

    The model may print them (`print(f(k="v"))`), or take them from a module (`default_api.f(k="v")`).
    """

    openers = (f"{_FENCE}tool_code",)
    call_opening = f"{_FENCE}tool_code\n"

    @classmethod
    def write_calls(cls, grammar: CallGrammar) -> str:
        calls = grammar.repeated(cls.write_python_call(grammar), literal("\n"))
        return " ".join((calls, grammar.text(f"\n{_FENCE}")))

    def _read_call(self, _opener: str) -> Reading[None]:
        if (yield from self._reader.skip_space()) == "[":
            self._reader.skip(1)
            yield from self._read_listed_calls(self._read_line)
            yield from self._reader.skip_space()
            with contextlib.suppress(EndOfTextError):
                yield from self._reader.take_if(_FENCE)
            return
        closed = False
        while not closed:
            yield from self._read_line()
            self._end_call()
            yield from self._reader.skip_space()
            with contextlib.suppress(EndOfTextError):
                closed = yield from self._reader.take_if(_FENCE)
            if not (yield from self._reader.peek()):
                return

    def _read_line(self) -> Reading[None]:
        is_printed = "print" not in self._tools and (yield from self._reader.take_if("print("))
        yield from self._read_python_call()
        if is_printed:
            yield from expect(self._reader, ")")

    def _function_name(self, name: str) -> str:
        return name if name in self._tools else name.removeprefix("default_api.")
