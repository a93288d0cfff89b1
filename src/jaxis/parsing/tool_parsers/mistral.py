"""Mistral: `[TOOL_CALLS] [{"name": "f", "arguments": {...}}]`, or `[TOOL_CALLS]f[ARGS]{...}` in newer models."""

from __future__ import annotations

import secrets
import string

from jaxis.parsing.text_reader import Reading
from jaxis.parsing.tool_parsers.call_grammar import CallGrammar, literal
from jaxis.parsing.tool_parsers.json_call import JSONToolParser

_ID_CHARACTERS = string.ascii_letters + string.digits


class MistralToolParser(JSONToolParser):
    """Mistral 7B v0.3 and all later ones, Mixtral v0.3, Magistral. Ids are nine letters and digits."""

    needs_special_tokens = True
    openers = call_markers = ("[TOOL_CALLS]",)
    dropped = ("</s>",)
    call_opening = "[TOOL_CALLS]"

    @classmethod
    def write_calls(cls, grammar: CallGrammar) -> str:
        if not grammar.has_token("[ARGS]"):
            return f"{grammar.text(' ')} {grammar.json_calls(cls.call_schemas(grammar))}"
        calls = []
        for tool in grammar.tools:
            arguments = grammar.json_argument(tool, tool.parameters)
            calls.append(grammar.rule(f"{literal(tool.name)} {grammar.text('[ARGS]')} {arguments}"))
        return grammar.choice(calls)

    def _read_call(self, _opener: str) -> Reading[None]:
        character = yield from self._reader.skip_space()
        if character == "[":
            yield from self._read_call_list()
            return
        name = yield from self._read_name()
        call_id = (yield from self._read_name()) if (yield from self._reader.take_if("[CALL_ID]")) else None
        yield from self._reader.take_if("[ARGS]")
        yield from self._read_arguments(name, call_id)
        self._end_call()

    def _new_id(self) -> str:
        return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(9))
