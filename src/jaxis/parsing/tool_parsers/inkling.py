"""Inkling: an answer is a sequence of messages, each with its kind of content; calls are messages of JSON.

`<|message_model|>f<|content_invoke_tool_json|>{"name":"f","args":{...}}<|end_message|>`. The header before the kind is
empty but for calls. Most prompts end in `<|message_model|>`, so the text begins in a header.
"""

from __future__ import annotations

from jaxis.parsing.text_reader import Reading, TextReader
from jaxis.parsing.tool_parsers.call_grammar import CallGrammar, literal
from jaxis.parsing.tool_parsers.json_call import JSONToolParser
from jaxis.parsing.tool_parsers.tools import FUNCTION_NAME

INKLING_MESSAGE = "<|message_model|>"
INKLING_TEXT, INKLING_THINKING = "<|content_text|>", "<|content_thinking|>"
INKLING_CALL = "<|content_invoke_tool_json|>"
INKLING_KINDS = (
    *(INKLING_TEXT, INKLING_THINKING, INKLING_CALL),
    *("<|content_invoke_tool_text|>", "<|content_tool_error|>"),
)
INKLING_ENDS = ("<|end_message|>", "<|content_model_end_sampling|>")


def read_inkling_header(reader: TextReader) -> Reading[str]:
    """Reads a message's header, up to its kind. Returns the text that is none, since no kind follows."""
    name = yield from reader.take_while(lambda text: FUNCTION_NAME.fullmatch(text) is not None)
    for kind in INKLING_KINDS:
        if (yield from reader.comes(kind)):
            return ""
    return name


class InklingToolParser(JSONToolParser):
    """Removes all headers; without the reasoning parser, the thinking stays in the content."""

    needs_special_tokens = True
    openers = call_markers = (INKLING_CALL,)
    dropped = (INKLING_MESSAGE, *(kind for kind in INKLING_KINDS if kind != INKLING_CALL), *INKLING_ENDS)
    call_opening = INKLING_CALL
    arguments_key = "args"

    @classmethod
    def write_calls(cls, grammar: CallGrammar) -> str:
        return f"{grammar.json_call(cls.call_schemas(grammar))} {grammar.text(INKLING_ENDS[0])}"

    @classmethod
    def write_answer(cls, grammar: CallGrammar, answer: str | None, *, must_call: bool) -> str:
        """Returns an answer from within its message on; the first call may begin its own, or end that of the answer."""
        if answer is None and not must_call:
            return super().write_answer(grammar, answer, must_call=must_call)
        end = grammar.text(INKLING_ENDS[0])
        messages = []
        for tool, schema in zip(grammar.tools, cls.call_schemas(grammar), strict=True):
            header = f"{grammar.text(INKLING_MESSAGE)} {literal(tool.name)} {grammar.text(INKLING_CALL)}"
            messages.append(grammar.rule(f"{header} {grammar.json_call([schema])} {end}"))
        message = grammar.rule(grammar.choice(messages))
        first = grammar.rule(f"{grammar.text(INKLING_CALL)} {cls.write_calls(grammar)} | {end} {message}")
        more = "*" if grammar.max_calls is None else f"{{0,{grammar.max_calls - 1}}}"
        calls = first if grammar.max_calls == 1 else grammar.rule(f"{first} {message}{more}")
        return calls if must_call or answer is None else grammar.choice((answer, calls))

    def _read(self) -> Reading[None]:
        marker: str | None = INKLING_MESSAGE
        while marker is not None:
            if marker == INKLING_MESSAGE:
                self._add_content((yield from read_inkling_header(self._reader)))
            elif marker == INKLING_CALL:
                yield from self._attempt(marker)
            marker = yield from self._reader.until(self.openers + self.dropped, self._add_content)
        self._end_content()

    def _read_call(self, _opener: str) -> Reading[None]:
        yield from self._read_call_object()
        self._end_call()
