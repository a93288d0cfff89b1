from __future__ import annotations

import contextlib
from typing import ClassVar

from jaxis.parsing.text_reader import EndOfTextError, Reading
from jaxis.parsing.tool_parsers.call_grammar import CallGrammar, literal
from jaxis.parsing.tool_parsers.pythonic import _FENCE, PythonicToolParser


class Olmo3ToolParser(PythonicToolParser):
    """OLMo 3: `<function_calls>f(k="v")</function_calls>`, one call a line. The tags are not special tokens."""

    openers = call_markers = ("<function_calls>",)
    call_opening = "<function_calls>"
    closing: ClassVar[str] = "</function_calls>"

    @classmethod
    def write_calls(cls, grammar: CallGrammar) -> str:
        calls = grammar.repeated(cls.write_python_call(grammar), literal("\n"))
        return f"{calls} {grammar.text(cls.closing)}"

    def _read_call(self, _opener: str) -> Reading[None]:
        closed = False
        while not closed:
            yield from self._read_python_call()
            self._end_call()
            yield from self._reader.skip_space()
            with contextlib.suppress(EndOfTextError):
                closed = yield from self._reader.take_if(self.closing.strip())
            if not (yield from self._reader.peek()):
                return


class MiniCPMToolParser(Olmo3ToolParser):
    """MiniCPM3: calls between `<|tool_call_start|>` and `<|tool_call_end|>`, in a block that is fenced as `python`."""

    needs_special_tokens = True
    openers = call_markers = ("<|tool_call_start|>",)
    dropped = ("<|tool_call_end|>", "<|im_end|>", "</s>")
    call_opening = f"<|tool_call_start|>\n{_FENCE}python\n"
    closing = f"\n{_FENCE}\n<|tool_call_end|>"

    def _read_call(self, opener: str) -> Reading[None]:
        yield from self._reader.skip_space()
        if (yield from self._reader.take_if(_FENCE)):
            yield from self._reader.take_if("python")
        yield from super()._read_call(opener)
