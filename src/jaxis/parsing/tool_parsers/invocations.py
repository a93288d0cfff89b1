"""Calls with a tag for each argument: MiniMax M2, Muse Glimmer, DeepSeek V3.2 and V4."""

# ruff: noqa: RUF001 (the bars are the format's)

from __future__ import annotations

import contextlib

from jaxis.parsing.harmony import read_first_recipient, read_header
from jaxis.parsing.text_reader import EndOfTextError, Reading
from jaxis.parsing.tool_parsers.call_grammar import ANY_TEXT, CallGrammar
from jaxis.parsing.tool_parsers.json_value import MalformedCallError
from jaxis.parsing.tool_parsers.tools import FunctionTool
from jaxis.parsing.tool_parsers.xml_call import XMLToolParser

_START = "<|start|>"
MUSE_ENDS = ("<|eom|>", "<|eot|>")
MUSE_NO_TOOLS = (None, "self", "user")
"""Recipients of Muse Glimmer's messages that are not calls: `self` for reasoning, `user` or none for an answer."""


class InvocationsToolParser(XMLToolParser):
    """Strings are written verbatim, other values as JSON."""

    needs_special_tokens = True

    @classmethod
    def write_invocation(cls, grammar: CallGrammar, tool: FunctionTool) -> str:
        begin = grammar.text(f"{cls.call_tags[0]}{tool.name}{cls.call_tags[1]}\n")
        return grammar.rule(f"{begin} {cls.write_arguments(grammar, tool)} {grammar.text(cls.call_end)}")

    def _read_invocations(self) -> Reading[None]:
        """Reads at least one call, up to the text after the last."""
        yield from self._expect(self.call_tags[0])
        yield from self._read_invocation()
        with contextlib.suppress(EndOfTextError):
            yield from self._reader.skip_space()
            while (yield from self._reader.take_if(self.call_tags[0])):
                yield from self._read_invocation()
                yield from self._reader.skip_space()

    def _read_invocation(self) -> Reading[None]:
        yield from self._read_call_from_name()
        self._end_call()


class MiniMaxM2ToolParser(InvocationsToolParser):
    openers = call_markers = ("<minimax:tool_call>",)
    dropped = ("</minimax:tool_call>", "[e~[")
    call_opening = "<minimax:tool_call>\n"
    argument_tags = ('<parameter name="', '">')
    value_end = "</parameter>"
    call_tags = ('<invoke name="', '">')
    call_end = "</invoke>"
    section_tags = ("<minimax:tool_call>", "</minimax:tool_call>")

    @classmethod
    def write_calls(cls, grammar: CallGrammar) -> str:
        call = grammar.choice(cls.write_invocation(grammar, tool) for tool in grammar.tools)
        calls = grammar.repeated(call, grammar.text("\n"))
        return " ".join((calls, grammar.text("\n</minimax:tool_call>")))

    def _read_call(self, _opener: str) -> Reading[None]:
        yield from self._read_invocations()


class MuseGlimmerToolParser(InvocationsToolParser):
    """Muse Glimmer: `<|start|>assistant to=f<|message|><atem:function_calls>...</atem:function_calls><|eom|>`.

    Every message names its recipient, the first one in a header that the prompt has begun. A call is one only in a
    message to a tool: what reasoning or an answer quotes is none.
    """

    openers = (_START,)
    dropped = (*MUSE_ENDS, "</atem:function_calls>")
    argument_tags = ('<atem:parameter name="', '">')
    value_end = "</atem:parameter>"
    call_tags = ('<atem:invoke name="', '">')
    call_end = "</atem:invoke>"
    section_tags = ("<atem:function_calls>", "</atem:function_calls>")
    writes_reasoning = True

    @classmethod
    def write_answer(cls, grammar: CallGrammar, answer: str | None, *, must_call: bool) -> str:
        """Returns messages to itself, then calls, or a message to the user that calls may follow."""
        next_message = grammar.text(f"<|eom|>{_START}assistant")
        to_itself = grammar.rule(f"{grammar.text(' to=self<|message|>')} {ANY_TEXT} {next_message}")
        calls = []
        for tool in grammar.tools:
            begin = grammar.text(f" to={tool.name}<|message|>\n<atem:function_calls>\n")
            end = grammar.text("\n</atem:function_calls>")
            calls.append(grammar.rule(f"{begin} {cls.write_invocation(grammar, tool)} {end}"))
        called = grammar.repeated(grammar.rule(grammar.choice(calls)), next_message)
        if must_call:
            return f"{to_itself}* {called}"
        to_user = grammar.text(" to=user<|message|>")
        if answer is not None:
            return f"{to_itself}* ({to_user} {answer} | {called})"
        said = grammar.rule(f"{to_user} {ANY_TEXT} {next_message}")
        return f"({to_itself} | {said})* ({to_user} {ANY_TEXT} | {called})"

    def _read(self) -> Reading[None]:
        if opener := (yield from read_first_recipient(self._reader)):
            yield from self._attempt(opener)
        yield from super()._read()

    def _read_call(self, opener: str) -> Reading[None]:
        header = yield from read_header(self._reader, opener, MUSE_ENDS)
        if not header.complete:
            raise EndOfTextError if not (yield from self._reader.peek()) else MalformedCallError
        if header.function in MUSE_NO_TOOLS:
            self._reader.record()
            return
        yield from self._expect(self.section_tags[0])
        yield from self._read_invocations()

    def _offered_call_begins(self) -> Reading[bool]:
        return (yield from self._reader.take_if(_START)) or (yield from super()._offered_call_begins())


class DeepSeekV32ToolParser(InvocationsToolParser):
    """DeepSeek V3.2: each parameter states whether its value is a verbatim string or JSON.

    `<｜DSML｜invoke name="f">`, then for each argument
    `<｜DSML｜parameter name="k" string="true">v</｜DSML｜parameter>`, then `</｜DSML｜invoke>`.
    """

    needs_special_tokens = True
    openers = ("<｜DSML｜invoke ",)
    dropped = ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", "<｜end▁of▁sentence｜>")
    argument_tags = ('<｜DSML｜parameter name="', '"')
    value_end = "</｜DSML｜parameter>"
    call_tags = ('<｜DSML｜invoke name="', '">')
    call_end = "</｜DSML｜invoke>"
    section_tags = ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>")
    call_opening = "<｜DSML｜function_calls>\n"

    @classmethod
    def write_calls(cls, grammar: CallGrammar) -> str:
        call = grammar.choice(cls.write_invocation(grammar, tool) for tool in grammar.tools)
        calls = grammar.repeated(call, grammar.text("\n"))
        return " ".join((calls, grammar.text(f"\n{cls.section_tags[1]}")))

    @classmethod
    def _after_name(cls, kinds: frozenset[str]) -> str:
        return f'" string="{"true" if kinds == {"string"} else "false"}">'

    def _read_call(self, _opener: str) -> Reading[None]:
        yield from self._expect('name="')
        yield from self._read_invocation()

    def _read_argument_name(self) -> Reading[str | None]:
        name = yield from super()._read_argument_name()
        if not (yield from self._reader.skip_space()):
            raise EndOfTextError
        if not (yield from self._reader.take_if('string="')):
            return None
        self._is_string = yield from self._reader.take_if("true")
        if not self._is_string and not (yield from self._reader.take_if("false")):
            return None
        return name if (yield from self._reader.take_if('">')) else None


class DeepSeekV4ToolParser(DeepSeekV32ToolParser):
    """DeepSeek V4: V3.2's format with another tag around all calls."""

    dropped = ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", "<｜end▁of▁sentence｜>")
    section_tags = ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>")
    call_opening = "<｜DSML｜tool_calls>\n"


class DeepSeekV41ToolParser(DeepSeekV32ToolParser):
    """DeepSeek V4.1: V3.2's format with a space in each tag."""

    openers = ("<｜DSML｜ invoke ",)
    dropped = ("<｜DSML｜ calls>", "</｜DSML｜ calls>", "<｜end▁of▁sentence｜>")
    argument_tags = ('<｜DSML｜ parameter name="', '"')
    value_end = "</｜DSML｜ parameter>"
    call_tags = ('<｜DSML｜ invoke name="', '">')
    call_end = "</｜DSML｜ invoke>"
    section_tags = ("<｜DSML｜ calls>", "</｜DSML｜ calls>")
    call_opening = "<｜DSML｜ calls>\n"
