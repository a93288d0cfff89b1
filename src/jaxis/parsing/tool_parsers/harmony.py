"""GPT-OSS: messages to functions, `<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>`."""

from __future__ import annotations

from jaxis.parsing.harmony import ENDS, OPENERS, read_first_recipient, read_header
from jaxis.parsing.text_reader import EndOfTextError, Reading
from jaxis.parsing.tool_parsers.json_call import JSONToolParser
from jaxis.parsing.tool_parsers.json_value import MalformedCallError


class HarmonyToolParser(JSONToolParser):
    """Removes all headers; without the reasoning parser, the analysis stays in the content."""

    needs_special_tokens = True
    openers = OPENERS
    dropped = ENDS

    def _read(self) -> Reading[None]:
        if opener := (yield from read_first_recipient(self._reader)):
            yield from self._attempt(opener)
        yield from super()._read()

    def _read_call(self, opener: str) -> Reading[None]:
        header = yield from read_header(self._reader, opener)
        if not header.complete:
            raise EndOfTextError if not (yield from self._reader.peek()) else MalformedCallError
        if header.function is None:
            self._reader.record()
            return
        yield from self._read_arguments(header.function)
        yield from self._reader.skip_space()
        for end in ENDS:
            if (yield from self._reader.take_if(end)):
                break
        self._end_call()

    def _give_back(self, _begun: bool) -> None:
        self._add_content(self._reader.recorded())  # read the whole message: its header contains openers
