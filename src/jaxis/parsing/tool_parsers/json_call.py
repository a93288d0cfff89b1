"""Calls whose arguments are written as JSON, and the formats that have one call after the other."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable
from typing import Any, ClassVar

from jaxis.parsing.text_reader import EndOfTextError, Reading
from jaxis.parsing.tool_parsers.base import ToolParser
from jaxis.parsing.tool_parsers.call_grammar import CallGrammar, call_schema, literal
from jaxis.parsing.tool_parsers.json_value import (
    MalformedCallError,
    clean_json_object,
    expect,
    read_json_string,
    read_json_value,
)

# Calls whose arguments are written as JSON.


_ARGUMENTS_KEYS = ("arguments", "parameters")
_VALUE_ENDS = (",", "}")


class JSONToolParser(ToolParser):
    """Reads {"name": "f", "arguments": {...}}, and arguments on their own.

    Attributes:
      name_key: The key of the function's name.
      arguments_key: The key of its arguments, in the model's own calls.
      ignored_keys: Keys that may come before the arguments and have no meaning.
      arguments_end: Markers after arguments on their own, beside those that open a call or end a turn.
    """

    name_key: ClassVar[str] = "name"
    arguments_key: ClassVar[str] = "arguments"
    ignored_keys: ClassVar[tuple[str, ...]] = ("type",)
    arguments_end: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def call_schemas(cls, grammar: CallGrammar) -> list[dict[str, Any]]:
        """The schema of each function's calls."""
        return [call_schema(tool, cls.name_key, cls.arguments_key) for tool in grammar.tools]

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
                yield from self._read_arguments(name, call_id, _VALUE_ENDS)
            elif (yield from self._opens_object()):
                arguments = yield from read_json_value(self._reader, lambda _: None)
            else:
                arguments = yield from self._read_odd_arguments(_VALUE_ENDS)
        self._close_object(name, call_id)

    def _close_object(self, name: str | None, call_id: str | None) -> None:
        """Closes the call's object; a call without arguments gets empty ones."""
        if self._arguments_done:
            return
        if name is None:
            raise MalformedCallError
        self._whole_call(name, call_id, "{}")

    def _read_arguments(self, name: str, call_id: str | None = None, ends: tuple[str, ...] = ()) -> Reading[None]:
        """Reads a call's arguments, and passes them on as they come.

        Args:
          name: The function's.
          call_id: The call's id, if it has one.
          ends: What follows where there are none; empty is what follows arguments on their own.
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


# Hermes and Qwen: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, once for each call.


class HermesToolParser(JSONToolParser):
    """Hermes 2 and 3, Qwen 2.5, Qwen 3. The tags are not special tokens."""

    openers = call_markers = ("<tool_call>",)
    call_opening = "<tool_call>\n"
    call_separator = "\n"

    @classmethod
    def write_calls(cls, grammar: CallGrammar) -> str:
        return " ".join((grammar.json_call(cls.call_schemas(grammar)), grammar.text("\n</tool_call>")))

    def _read_call(self, _opener: str) -> Reading[None]:
        yield from self._read_call_object()
        yield from self._reader.skip_space()
        yield from self._reader.take_if("</tool_call>")
        self._end_call()


# Calls as the whole message.


class WholeMessageToolParser(JSONToolParser):
    """Formats whose calls are the whole message, or come after a special token.

    Without a special token before it, what looks like a call may be an answer: it is a call only if the message begins
    with it and it names a function that was offered.

    Attributes:
      bracket: What calls begin with.
    """

    bracket: ClassVar[str]

    @classmethod
    def write_calls(cls, grammar: CallGrammar) -> str:
        """The calls, without a special token."""
        raise NotImplementedError

    @classmethod
    def write_answer(cls, grammar: CallGrammar, answer: str | None, *, must_call: bool) -> str:
        """The calls; text that is none does not begin as they do, with a bracket."""
        calls = cls.write_calls(grammar)
        if must_call:
            return calls
        after_token = (f"{grammar.text(token)} {calls}" for token in cls.openers if grammar.has_token(token))
        if answer is not None:
            return grammar.choice((answer, calls, *after_token))
        text = grammar.terminal(rf"/\s*([^\s\{cls.bracket}](?s:.*))?/")
        text = grammar.rule(f"{text} {grammar.more_free_text(*cls.openers)}")
        return grammar.choice((text, calls, *after_token))

    def _read(self) -> Reading[None]:
        yield from self._attempt("")
        yield from super()._read()

    def _read_call(self, opener: str) -> Reading[None]:
        if opener:
            self._reader.record()  # a special token is not content
        yield from self._read_calls()

    def _read_calls(self) -> Reading[None]:
        """Reads what `write_calls` writes."""
        raise NotImplementedError

    def _is_call(self, name: str) -> bool:
        return not self._tools or name in self._tools


# Llama 3.x and 4: `{"name": "f", "parameters": {...}}`.


class LlamaToolParser(WholeMessageToolParser):
    """Llama 3.1, 3.2, 3.3 and 4. Several calls are separated by `;` or white space.

    Python code after `<|python_tag|>` is content.
    """

    needs_special_tokens = True
    bracket = "{"
    openers = ("<|python_tag|>", "<|python_start|>")
    dropped = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|python_end|>", "<|eot|>", "<|eom|>")
    arguments_key = "parameters"

    @classmethod
    def write_calls(cls, grammar: CallGrammar) -> str:
        return grammar.json_call(cls.call_schemas(grammar))

    def _read_calls(self) -> Reading[None]:
        while True:
            yield from self._read_call_object()
            self._end_call()
            yield from self._reader.skip_space()
            yield from self._reader.take_if(";")


# Mistral: `[TOOL_CALLS] [{"name": "f", "arguments": {...}}]`, and in newer models `[TOOL_CALLS]f[ARGS]{...}`.


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


# Kimi K2: `<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>` in a section.


_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")
_ARGUMENTS = "<|tool_call_argument_begin|>"
_CLOSE = "<|tool_call_end|>"


class KimiToolParser(JSONToolParser):
    """Kimi K2 and K2 Thinking. A call's id contains its name and is kept: the template writes it back."""

    needs_special_tokens = True
    openers = ("<|tool_call_begin|>",)
    call_markers = ("<|tool_calls_section_begin|>",)
    dropped = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|im_end|>")
    call_opening = "<|tool_calls_section_begin|>"
    arguments_end = (_CLOSE,)

    @classmethod
    def write_calls(cls, grammar: CallGrammar) -> str:
        calls = (
            grammar.rule(
                f"{grammar.text(f'<|tool_call_begin|>functions.{tool.name}:')} /[0-9]{{1,4}}/ "
                f"{grammar.text(_ARGUMENTS)} {grammar.json_argument(tool, tool.parameters)} {grammar.text(_CLOSE)}"
            )
            for tool in grammar.tools
        )
        call = grammar.rule(grammar.choice(calls))
        return f"{grammar.repeated(call)} {grammar.text('<|tool_calls_section_end|>')}"

    def _read_call(self, opener: str) -> Reading[None]:
        pieces: list[str] = []
        marker = yield from self._reader.until((_ARGUMENTS, _CLOSE, opener), pieces.append)
        if marker is None:
            raise EndOfTextError
        call_id = "".join(pieces).strip()
        match = _ID.fullmatch(call_id)
        if marker != _ARGUMENTS or match is None:
            raise MalformedCallError
        yield from self._read_arguments(match[1], call_id)
        yield from self._reader.skip_space()
        yield from self._reader.take_if(_CLOSE)
        self._end_call()


# DeepSeek V3, R1 and V3.1: calls between special tokens.
#
# V3 and R1: `<｜tool▁call▁begin｜>function<｜tool▁sep｜>f`, a line break, the arguments as a fenced block of JSON, and
# `<｜tool▁call▁end｜>`. V3.1: `<｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`.


_SEPARATOR = "<｜tool▁sep｜>"  # noqa: RUF001
_CALLS_CLOSE = "<｜tool▁call▁end｜>"  # noqa: RUF001


class DeepSeekToolParser(JSONToolParser):
    """Parses both formats: in the newer one the arguments follow the separator directly."""

    needs_special_tokens = True
    openers = ("<｜tool▁call▁begin｜>",)  # noqa: RUF001
    dropped = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜end▁of▁sentence｜>")  # noqa: RUF001
    call_markers = ("<｜tool▁calls▁begin｜>",)  # noqa: RUF001
    call_opening = "<｜tool▁calls▁begin｜>"  # noqa: RUF001
    arguments_end = ("```", _CALLS_CLOSE)

    @classmethod
    def write_calls(cls, grammar: CallGrammar) -> str:
        calls: list[str] = []
        for tool in grammar.tools:
            arguments = grammar.json_argument(tool, tool.parameters)
            for before, after in (
                (f"function{_SEPARATOR}{tool.name}\n```json\n", f"\n```{_CALLS_CLOSE}"),
                (tool.name + _SEPARATOR, _CALLS_CLOSE),
            ):
                calls.append(f"{grammar.text(cls.openers[0] + before)} {arguments} {grammar.text(after)}")
        separator = grammar.rule(literal("\n") + "?")
        calls_end = grammar.text("<｜tool▁calls▁end｜>")  # noqa: RUF001
        return f"{grammar.repeated(grammar.rule(grammar.choice(calls)), separator)} {calls_end}"

    def _read_call(self, _opener: str) -> Reading[None]:
        name = yield from self._read_up_to(_SEPARATOR)
        fenced = (yield from self._reader.peek()) not in ("{", "") and not (yield from self._reader.comes(_CALLS_CLOSE))
        if fenced:
            name = yield from self._read_up_to("\n")
            yield from self._reader.skip_space()
            yield from self._reader.take_if("```json")
        yield from self._read_arguments(name)
        yield from self._reader.skip_space()
        if fenced:
            yield from self._reader.take_if("```")
        yield from self._reader.take_if(_CALLS_CLOSE)
        self._end_call()

    def _read_up_to(self, end: str) -> Reading[str]:
        pieces: list[str] = []
        marker = yield from self._reader.until((end, _CALLS_CLOSE, *self.openers), pieces.append)
        if marker is None:
            raise EndOfTextError
        if marker != end:
            raise MalformedCallError
        return "".join(pieces).strip()
