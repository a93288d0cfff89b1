"""Calls whose arguments are written as JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from jaxis.parsing.text_reader import EndOfTextError, Reading
from jaxis.parsing.tool_parsers.base import ToolParser
from jaxis.parsing.tool_parsers.json_value import (
    MalformedCallError,
    clean_json_object,
    expect,
    read_json_string,
    read_json_value,
)

_ARGUMENTS_KEYS = ("arguments", "parameters")


class JSONToolParser(ToolParser):
    """Reads {"name": "f", "arguments": {...}}, and arguments on their own.

    Attributes:
      name_key: The key of the function's name.
      ignored_keys: Keys that may come before the arguments and have no meaning.
    """

    name_key: ClassVar[str] = "name"
    ignored_keys: ClassVar[tuple[str, ...]] = ("type",)

    def _is_call(self, _name: str) -> bool:
        """Whether an object with this name and with arguments is a call."""
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
            elif key not in _ARGUMENTS_KEYS:
                raise MalformedCallError
            elif name is not None:
                yield from self._read_arguments(name, call_id)
            elif (yield from self._opens_object()):
                arguments = yield from read_json_value(self._reader, lambda _: None)
            else:
                arguments = yield from self._read_odd_arguments()
        self._close_object(name, call_id)

    def _close_object(self, name: str | None, call_id: str | None) -> None:
        """Closes the call's object; a call without arguments gets empty ones."""
        if self._arguments_done:
            return
        if name is None:
            raise MalformedCallError
        self._whole_call(name, call_id, "{}")

    def _read_arguments(self, name: str, call_id: str | None = None) -> Reading[None]:
        """Reads a call's arguments, and passes them on as they come."""
        if (yield from self._opens_object()):
            self._start_call(name, call_id)
            yield from read_json_value(self._reader, self._add_arguments)
            self._arguments_done = True
        else:
            self._whole_call(name, call_id, (yield from self._read_odd_arguments()))

    def _read_odd_arguments(self) -> Reading[str]:
        """Reads arguments that are not an object: a string that contains one, or null for none."""
        if (yield from self._reader.skip_space()) == '"':
            return clean_json_object((yield from read_json_string(self._reader)))
        if (yield from read_json_value(self._reader, lambda _: None)) != "null":
            raise MalformedCallError
        return "{}"

    def _whole_call(self, name: str, call_id: str | None, arguments: str) -> None:
        self._start_call(name, call_id)
        self._add_arguments(arguments)
        self._arguments_done = True

    def _read_calls(self) -> Reading[None]:
        """Reads calls in a JSON array, or a single one."""
        if (yield from self._reader.skip_space()) == "[":
            yield from self._read_call_list()
        else:
            yield from self._read_call_object()
            self._end_call()

    def _read_call_list(self) -> Reading[None]:
        """Reads calls in a JSON array; the first one opens it."""
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
        """Whether a key comes next; the object's end, if that comes instead, is taken."""
        character = yield from self._reader.skip_space()
        if character == ",":
            self._reader.skip(1)
            character = yield from self._reader.skip_space()
        if not character:
            raise EndOfTextError
        if character == "}":
            self._reader.skip(1)
        return character != "}"
