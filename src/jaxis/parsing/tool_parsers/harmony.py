"""GPT-OSS: messages to functions, `<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>`."""

from __future__ import annotations

from jaxis.parsing.harmony import ENDS, OPENERS, read_first_recipient, read_header
from jaxis.parsing.text_reader import EndOfTextError, Reading
from jaxis.parsing.tool_parsers.call_grammar import ANY_TEXT, CallGrammar
from jaxis.parsing.tool_parsers.json_call import JSONToolParser
from jaxis.parsing.tool_parsers.json_value import MalformedCallError

_CALL_HEADERS = (
    "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>",
    " to=functions.{}<|channel|>commentary <|constrain|>json<|message|>",
    " to=functions.{}<|channel|>commentary json<|message|>",
)


class HarmonyToolParser(JSONToolParser):
    """Removes all headers; without the reasoning parser, the analysis stays in the content."""

    needs_special_tokens = True
    openers = OPENERS
    dropped = ENDS
    writes_reasoning = True

    @classmethod
    def write_answer(cls, grammar: CallGrammar, answer: str | None, *, must_call: bool) -> str:
        """Returns analysis and preambles, then one call, which ends a turn, or the message on the final channel.

        The marker after a call ends the answer as end-of-sequence does.
        """
        next_message = grammar.text("<|end|><|start|>assistant")
        channels = grammar.choice(grammar.text(f"<|channel|>{name}<|message|>") for name in ("analysis", "commentary"))
        before = grammar.rule(f"{channels} {ANY_TEXT} {next_message}")
        calls = []
        for tool in grammar.tools:
            headers = grammar.choice(grammar.text(header.format(tool.name)) for header in _CALL_HEADERS)
            calls.append(grammar.rule(f"{headers} {grammar.json_argument(tool, tool.parameters)}"))
        last = grammar.choice(calls)
        if not must_call:
            headers = [grammar.text("<|channel|>final<|message|>")]
            if answer is not None:
                headers.append(grammar.text("<|channel|>final <|constrain|>json<|message|>"))
            last = f"({grammar.choice(headers)} {answer or ANY_TEXT} | {last})"
        return f"{before}* {last}"

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
