"""Cohere: a list of `{"tool_name": "f", "parameters": {...}}`, between special tokens or as a fenced block."""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

from jaxis.parsing.text_reader import EndOfTextError, Reading
from jaxis.parsing.tool_parsers.call_grammar import CallGrammar, call_schema, moved
from jaxis.parsing.tool_parsers.json_call import JSONToolParser
from jaxis.parsing.tool_parsers.json_value import expect, read_json_string


class CallListToolParser(JSONToolParser):
    """Phi 4 mini.

    Attributes:
      closing: What the model writes after the list.
    """

    needs_special_tokens = True
    openers = call_markers = ("<|tool_call|>",)
    dropped = ("<|/tool_call|>", "<|end|>", "<|endoftext|>")
    call_opening = "<|tool_call|>"
    closing: ClassVar[str] = "<|/tool_call|>"

    @classmethod
    def write_calls(cls, grammar: CallGrammar) -> str:
        return f"{grammar.json_calls(cls.call_schemas(grammar))} {grammar.text(cls.closing)}"

    def _read_call(self, _opener: str) -> Reading[None]:
        yield from self._read_call_list()


class HunyuanToolParser(CallListToolParser):
    """Hunyuan A13B and the dense ones: `<tool_calls>[...]</tool_calls>`. The tags are not special tokens."""

    needs_special_tokens = False
    openers = call_markers = ("<tool_calls>",)
    dropped = ()
    call_opening = "<tool_calls>"
    closing = "</tool_calls>"

    def _read_call(self, _opener: str) -> Reading[None]:
        yield from self._read_call_list()
        yield from self._reader.skip_space()
        with contextlib.suppress(EndOfTextError):
            yield from self._reader.take_if(self.closing)


class NemotronNanoV2ToolParser(HunyuanToolParser):
    """Nemotron Nano 2: `<TOOLCALL>[...]</TOOLCALL>`."""

    openers = call_markers = ("<TOOLCALL>",)
    call_opening = "<TOOLCALL>"
    closing = "</TOOLCALL>"


class BareCallListToolParser(JSONToolParser):
    """A list that is the whole message, as `required_tools_schema` makes a model write it."""

    def _read(self) -> Reading[None]:
        yield from self._attempt("")
        yield from super()._read()

    def _read_call(self, _opener: str) -> Reading[None]:
        yield from self._read_call_list()


# Granite 3: `<|tool_call|>[{"name": "f", "arguments": {...}}]`, or the list after `<tool_call>`.


class GraniteToolParser(CallListToolParser):
    """Granite 3.0 to 3.3. Some of them write `<tool_call>`, which is not a special token, or a single object."""

    needs_special_tokens = True
    openers = call_markers = ("<|tool_call|>", "<tool_call>")
    dropped = ("<|end_of_text|>",)
    closing = ""

    @classmethod
    def opening_of(cls, grammar: CallGrammar) -> str:
        return next((opener for opener in cls.openers if grammar.has_token(opener)), cls.openers[-1])

    @classmethod
    def write_call_after(cls, opener: str, grammar: CallGrammar) -> str | None:  # noqa: ARG003
        return grammar.rule(cls.write_calls(grammar))

    def _read_call(self, opener: str) -> Reading[None]:
        yield from self._read_calls()
        yield from self._reader.skip_space()
        with contextlib.suppress(EndOfTextError):
            yield from self._reader.take_if(opener.replace("<", "</", 1))


# Apertus: `<|tools_prefix|>[{"f": {...}}]<|tools_suffix|>`.


class ApertusToolParser(CallListToolParser):
    """A call is an object with one key, the function's name."""

    needs_special_tokens = True
    openers = call_markers = ("<|tools_prefix|>",)
    dropped = ("<|tools_suffix|>", "<|assistant_end|>")
    call_opening = "<|tools_prefix|>"
    closing = "<|tools_suffix|>"

    @classmethod
    def call_schemas(cls, grammar: CallGrammar) -> list[dict[str, Any]]:
        return [
            {
                "type": "object",
                "properties": {tool.name: moved(tool.parameters, f"#/properties/{tool.name}")},
                "required": [tool.name],
                "additionalProperties": False,
            }
            for tool in grammar.tools
        ]

    def _read_object(self) -> Reading[None]:
        yield from expect(self._reader, "{")
        name = yield from read_json_string(self._reader)
        yield from expect(self._reader, ":")
        yield from self._read_arguments(name)
        yield from expect(self._reader, "}")


# Cohere: a list of `{"tool_name": "f", "parameters": {...}}`, between special tokens or as a fenced block.


_FENCE = "```"


class CohereToolParser(CallListToolParser):
    """Command R7B, Command A and later: `<|START_ACTION|>[...]<|END_ACTION|>`.

    The model numbers its calls in `tool_call_id`. The template counts the calls of a conversation itself, and takes
    any ids; so calls get ids of their own, which are unique even if the model counts wrongly.
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
