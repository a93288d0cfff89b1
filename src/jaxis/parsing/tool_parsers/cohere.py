"""Cohere: a list of `{"tool_name": "f", "parameters": {...}}`, between special tokens or as a fenced block."""

from __future__ import annotations

import contextlib
from typing import Any

from jaxis.parsing.text_reader import EndOfTextError, Reading
from jaxis.parsing.tool_parsers.call_grammar import CallGrammar, call_schema
from jaxis.parsing.tool_parsers.call_list import CallListToolParser

_FENCE = "```"


class CohereToolParser(CallListToolParser):
    """Command R7B, Command A and later: `<|START_ACTION|>[...]<|END_ACTION|>`.

    The template counts the calls of a conversation itself, and takes any ids; so calls get ids of their own instead of
    the model's `tool_call_id`, which are unique even if the model counts wrongly.
    """

    needs_special_tokens = True
    openers = call_markers = ("<|START_ACTION|>",)
    dropped = (
        "<|END_ACTION|>",
        "<|START_RESPONSE|>",
        "<|END_RESPONSE|>",
        "<|START_TEXT|>",
        "<|END_TEXT|>",
        "<|END_OF_TURN_TOKEN|>",
    )
    name_key = "tool_name"
    arguments_key = "parameters"
    ignored_keys = ("type", "tool_call_id")
    call_opening = "<|START_ACTION|>"
    closing = "<|END_ACTION|>"

    @classmethod
    def call_schemas(cls, grammar: CallGrammar) -> list[dict[str, Any]]:
        number = {"tool_call_id": {"type": "string", "pattern": "^[0-9]{1,3}$"}}
        return [call_schema(tool, cls.name_key, cls.arguments_key, number) for tool in grammar.tools]

    def _read_call(self, _opener: str) -> Reading[None]:
        yield from self._read_calls()


class CommandRToolParser(CallListToolParser):
    """Command R, Command R+ and Aya: `Action: ```json [...]```; a plan may precede it.

    These models call `directly_answer` if no tool is necessary; it is reported like any other call.
    """

    needs_special_tokens = False
    openers = ("Action:",)
    call_markers = ()
    dropped = ("<|END_OF_TURN_TOKEN|>",)
    name_key = "tool_name"
    arguments_key = "parameters"
    call_opening = f"Action: {_FENCE}json\n"
    closing = _FENCE

    def _read_call(self, _opener: str) -> Reading[None]:
        yield from self._reader.skip_space()
        yield from self._reader.take_if(_FENCE)
        yield from self._reader.take_if("json")
        yield from self._read_call_list()
        yield from self._reader.skip_space()
        with contextlib.suppress(EndOfTextError):
            yield from self._reader.take_if(_FENCE)
