"""Qwen 3 Coder: `<tool_call><function=f><parameter=k>v</parameter></function></tool_call>`, with line breaks."""

from __future__ import annotations

from jaxis.parsing.text_reader import Reading
from jaxis.parsing.tool_parsers.call_grammar import CallGrammar
from jaxis.parsing.tool_parsers.xml_call import XMLToolParser

_FUNCTION = "<function="


class Qwen3CoderToolParser(XMLToolParser):
    """Qwen 3 Coder, Qwen 3.5 to 3.8, Nemotron 3, Step 3.5 and 5, MiMo V2. The tags are not special tokens.

    The model sometimes forgets `<tool_call>`.
    """

    openers = ("<tool_call>", _FUNCTION)
    call_markers = ("<tool_call>",)
    call_opening = "<tool_call>\n"
    call_separator = "\n"
    argument_tags = ("<parameter=", ">")
    value_end = "</parameter>"
    call_tags = (_FUNCTION, ">")
    call_end = "</function>"
    section_tags = ("<tool_call>", "</tool_call>")
    values_on_own_lines = True

    @classmethod
    def write_calls(cls, grammar: CallGrammar) -> str:
        return cls._write_functions(grammar, _FUNCTION)

    @classmethod
    def write_call_after(cls, opener: str, grammar: CallGrammar) -> str | None:
        return cls._write_functions(grammar, "") if opener == _FUNCTION else super().write_call_after(opener, grammar)

    @classmethod
    def _write_functions(cls, grammar: CallGrammar, before_name: str) -> str:
        calls = []
        for tool in grammar.tools:
            begin, end = f"{before_name}{tool.name}>\n", f"{cls.call_end}\n{cls.section_tags[1]}"
            arguments = cls.write_arguments(grammar, tool)
            calls.append(grammar.rule(f"{grammar.text(begin)} {arguments} {grammar.text(end)}"))
        return grammar.choice(calls)

    def _read_call(self, opener: str) -> Reading[None]:
        self._in_section = opener != _FUNCTION
        if self._in_section:
            yield from self._expect(_FUNCTION)
        yield from self._read_call_from_name()
        yield from self._reader.skip_space()
        yield from self._reader.take_if(self.section_tags[1])
        self._end_call()


class SeedOssToolParser(Qwen3CoderToolParser):
    """Seed-OSS: the same function between `<seed:tool_call>` tags, and values without line breaks around them."""

    needs_special_tokens = True
    openers = ("<seed:tool_call>", _FUNCTION)
    call_markers = ("<seed:tool_call>",)
    dropped = ("<seed:eos>",)
    call_opening = "<seed:tool_call>\n"
    section_tags = ("<seed:tool_call>", "</seed:tool_call>")
    values_on_own_lines = False
