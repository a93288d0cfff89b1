"""Calls in Python's notation, `f(k="v", n=1)`."""

from __future__ import annotations

import contextlib
import json
import re

from jaxis.parsing.text_reader import EndOfTextError, Reading
from jaxis.parsing.tool_parsers.json_call import JSONToolParser
from jaxis.parsing.tool_parsers.json_value import MalformedCallError, expect
from jaxis.parsing.tool_parsers.python_value import PythonValueReader

_KEYWORD = re.compile(r"[^\W\d]\w*")


class PythonicToolParser(JSONToolParser):
    """Reads such a call; all arguments must be given by name."""

    def _read_python_call(self) -> Reading[None]:
        """Reads a call up to its closing parenthesis."""
        name = yield from self._read_name()
        yield from expect(self._reader, "(")
        self._start_call(name)
        self._add_arguments("{")
        separator = ""
        while (character := (yield from self._reader.skip_space())) != ")":
            if separator:
                yield from expect(self._reader, ",")
                character = yield from self._reader.skip_space()
                if character == ")":  # a comma after the last argument
                    break
            if not character:
                raise EndOfTextError
            keyword = yield from self._read_keyword()
            self._add_arguments(f"{separator}{json.dumps(keyword, ensure_ascii=False)}: ")
            separator = ", "
            yield from PythonValueReader(self._reader, self._add_arguments).read()
        self._reader.skip(1)
        self._add_arguments("}")
        self._arguments_done = True

    def _read_keyword(self) -> Reading[str]:
        keyword = yield from self._reader.take_while(lambda text: _KEYWORD.fullmatch(text) is not None)
        yield from expect(self._reader, "=")
        if not keyword:
            raise MalformedCallError
        return keyword


class LFM2ToolParser(PythonicToolParser):
    """LFM2 and LFM2.5: `<|tool_call_start|>[f(k="v"), g()]<|tool_call_end|>`, or the list in JSON if asked for it."""

    needs_special_tokens = True
    openers = call_markers = ("<|tool_call_start|>",)
    dropped = ("<|tool_call_end|>", "<|im_end|>")

    def _read_call(self, _opener: str) -> Reading[None]:
        yield from expect(self._reader, "[")
        in_json = (yield from self._reader.skip_space()) == "{"
        yield from self._read_listed_calls(self._read_call_object if in_json else self._read_python_call)


class Olmo3ToolParser(PythonicToolParser):
    """OLMo 3: `<function_calls>f(k="v")</function_calls>`, one call a line. The tags are not special tokens."""

    openers = call_markers = ("<function_calls>",)

    def _read_call(self, _opener: str) -> Reading[None]:
        closed = False
        while not closed:
            yield from self._read_python_call()
            self._end_call()
            yield from self._reader.skip_space()
            with contextlib.suppress(EndOfTextError):
                closed = yield from self._reader.take_if("</function_calls>")
            if not (yield from self._reader.peek()):
                return
