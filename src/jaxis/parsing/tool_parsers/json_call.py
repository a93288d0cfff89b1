from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from jaxis.parsing.text_reader import EndOfTextError, Reading
from jaxis.parsing.tool_parsers.base import ToolParser
from jaxis.parsing.tool_parsers.call_grammar import CallGrammar, call_schema
from jaxis.parsing.tool_parsers.json_value import (
    MalformedCallError,
    clean_json_object,
    expect,
    read_json_string,
    read_json_value,
)

_ARGUMENTS_KEYS = ("arguments", "parameters")
_VALUE_ENDS = (",", "}")


class JSONToolParser(ToolParser):
    """Base of parsers that read {"name": "f", "arguments": {...}}, and arguments in JSON on their own.

    Attributes:
      arguments_key: Key of a call's arguments, in the model's own calls.
      ignored_keys: Keys that may come before the arguments and have no meaning.
      arguments_end: Markers after arguments on their own, in addition to those that open a call or end a turn.
    """

    name_key: ClassVar[str] = "name"
    arguments_key: ClassVar[str] = "arguments"
    ignored_keys: ClassVar[tuple[str, ...]] = ("type",)
    arguments_end: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def call_schemas(cls, grammar: CallGrammar) -> list[dict[str, Any]]:
        return [call_schema(tool, cls.name_key, cls.arguments_key) for tool in grammar.tools]

    def _is_call(self, _name: str) -> bool:
        return True

    def _read_call_object(self) -> Reading[None]:
        """Reads a call up to the end of its object; errors after the arguments are ignored."""
        try:
            yield from self._read_object()
        except MalformedCallError:
            if not self._arguments_done:
                raise

    def _read_object(self) -> Reading[None]:
        name: str | None = None
        call_id: str | None = None
        arguments: str | None = None  # arguments that came before the name
        yield from expect(self._reader, "{")
        while (yield from self._next_key()):
            key = yield from read_json_string(self._reader)
            yield from expect(self._reader, ":")
            if self._arguments_done or key in self.ignored_keys:
                yield from self._skip_value()
            elif key == self.name_key:
                name = yield from read_json_string(self._reader)
                if not self._is_call(name):
                    raise MalformedCallError
                if arguments is not None:
                    self._whole_call(name, call_id, arguments)
            elif key == "id":
                call_id = yield from read_json_string(self._reader)
            elif key not in (*_ARGUMENTS_KEYS, self.arguments_key):
                raise MalformedCallError
            elif name is not None:
                yield from self._read_arguments(name, call_id, _VALUE_ENDS)
            elif (yield from self._opens_object()):
                arguments = yield from read_json_value(self._reader, lambda _: None)
            else:
                arguments = yield from self._read_odd_arguments(_VALUE_ENDS)
        self._close_object(name, call_id)

    def _close_object(self, name: str | None, call_id: str | None) -> None:
        if self._arguments_done:
            return
        if name is None:
            raise MalformedCallError
        self._whole_call(name, call_id, "{}")

    def _read_arguments(self, name: str, call_id: str | None = None, ends: tuple[str, ...] = ()) -> Reading[None]:
        """Reads a call's arguments, and passes them on as they come.

        `ends` are markers that follow if there are no arguments; empty means the markers after arguments on their own.
        """
        if (yield from self._opens_object()):
            self._start_call(name, call_id)
            yield from read_json_value(self._reader, self._add_arguments)
            self._arguments_done = True
        else:
            ends = ends or (*self.arguments_end, *self.openers, *self.dropped)
            self._whole_call(name, call_id, (yield from self._read_odd_arguments(ends)))

    def _read_odd_arguments(self, ends: tuple[str, ...]) -> Reading[str]:
        """Reads arguments that are not an object: a string that contains one, or null or nothing for none."""
        if (yield from self._reader.peek()) == '"':
            text = yield from read_json_string(self._reader)
            return clean_json_object(text) if text.strip() not in ("", "null") else "{}"
        for end in ends:
            if (yield from self._reader.comes(end)):
                return "{}"
        if (yield from read_json_value(self._reader, lambda _: None)) != "null":
            raise MalformedCallError
        return "{}"

    def _whole_call(self, name: str, call_id: str | None, arguments: str) -> None:
        self._start_call(name, call_id)
        self._add_arguments(arguments)
        self._arguments_done = True

    def _read_calls(self) -> Reading[None]:
        if (yield from self._reader.skip_space()) == "[":
            yield from self._read_call_list()
        else:
            yield from self._read_call_object()
            self._end_call()

    def _read_call_list(self) -> Reading[None]:
        yield from expect(self._reader, "[")
        yield from self._read_listed_calls(self._read_call_object)

    def _read_listed_calls(self, read_call: Callable[[], Reading[None]]) -> Reading[None]:
        """Reads calls with commas between them up to the bracket that closes their list."""
        while True:
            yield from read_call()
            self._end_call()
            character = yield from self._reader.skip_space()
            if character not in (",", "]"):
                return
            self._reader.skip(1)
            self._reader.record()
            if character == "]":
                return

    def _opens_object(self) -> Reading[bool]:
        character = yield from self._reader.skip_space()
        if not character:
            raise EndOfTextError
        return character == "{"

    def _skip_value(self) -> Reading[None]:
        yield from self._reader.skip_space()
        yield from read_json_value(self._reader, lambda _: None)

    def _next_key(self) -> Reading[bool]:
        """Returns whether a key comes next; takes the object's end if that comes instead."""
        character = yield from self._reader.skip_space()
        if character == ",":
            self._reader.skip(1)
            character = yield from self._reader.skip_space()
        if not character:
            raise EndOfTextError
        if character == "}":
            self._reader.skip(1)
        return character != "}"
