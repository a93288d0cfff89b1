"""GLM 4.5 and later: `<tool_call>f`, `<arg_key>k</arg_key><arg_value>v</arg_value>` each, and `</tool_call>`."""

from __future__ import annotations

from jaxis.parsing.text_reader import EndOfTextError, Reading
from jaxis.parsing.tool_parsers.call_grammar import CallGrammar, literal
from jaxis.parsing.tool_parsers.tools import FunctionTool
from jaxis.parsing.tool_parsers.xml_call import XMLToolParser


class GLMToolParser(XMLToolParser):
    """GLM 4.5 and later, Laguna. Strings are written verbatim, other values as JSON."""

    needs_special_tokens = True
    openers = call_markers = ("<tool_call>",)
    dropped = ("<|observation|>", "<|user|>", "<|endoftext|>")
    call_opening = "<tool_call>"
    call_separator = "\n"
    argument_tags = ("<arg_key>", "</arg_key>")
    value_begin, value_end = "<arg_value>", "</arg_value>"
    call_tags = ("<tool_call>", "")
    call_end = "</tool_call>"

    @classmethod
    def write_calls(cls, grammar: CallGrammar) -> str:
        return grammar.choice(cls._write_call(grammar, tool) for tool in grammar.tools)

    @classmethod
    def _write_call(cls, grammar: CallGrammar, tool: FunctionTool) -> str:
        begin = grammar.text(f"{tool.name}{cls.call_tags[1]}{cls.argument_end}")
        return grammar.rule(f"{begin} {cls.write_arguments(grammar, tool)} {grammar.text(cls.call_end)}")

    @classmethod
    def _after_name(cls, _kinds: frozenset[str]) -> str:
        return f"{cls.argument_tags[1]}{cls.argument_end}{cls.value_begin}"

    def _read_call(self, _opener: str) -> Reading[None]:
        self._in_section = False
        yield from self._read_call_from_name()
        self._end_call()

    def _read_argument_name(self) -> Reading[str | None]:
        name = yield from super()._read_argument_name()
        if not (yield from self._reader.skip_space()):
            raise EndOfTextError
        return name if (yield from self._reader.take_if(self.value_begin)) else None


class HunyuanV3ToolParser(GLMToolParser):
    """Hy3: the name ends with `<tool_sep>`, and all calls are between `<tool_calls>` tags.

    In published tokenizers all tags end alike, such as `<tool_call:opensource>`.
    """

    suffixed = ("openers", "call_markers", "call_opening", "argument_tags", "value_begin", "value_end", "call_tags")
    suffixed += ("call_end", "dropped")
    dropped = ("<tool_calls>", "</tool_calls>")
    call_markers = ("<tool_calls>",)
    call_opening = "<tool_calls>\n"
    call_tags = ("<tool_call>", "<tool_sep>")

    @classmethod
    def write_calls(cls, grammar: CallGrammar) -> str:
        begin, end = grammar.text(cls.call_tags[0]), literal(cls.argument_end)
        calls = grammar.choice(f"{begin} {cls._write_call(grammar, tool)} {end}" for tool in grammar.tools)
        return f"{grammar.repeated(calls)} {grammar.text(cls.dropped[1])}"


class HunyuanV4ToolParser(HunyuanV3ToolParser):
    """Hy4: no `<tool_sep>`, and no line breaks."""

    call_opening = "<tool_calls>"
    call_tags = ("<tool_call>", "")
    argument_end = ""
