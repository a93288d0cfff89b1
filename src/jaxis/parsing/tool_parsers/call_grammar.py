"""Grammars of tool calls as a model writes them, in llguidance's dialect of Lark.

A format is a `ToolParser`: it writes the grammar of what it reads, with the helpers here. Its markers are tokens where
the tokenizer has them as special tokens, which no text can spell, and text elsewhere.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxis.parsing.ecma_pattern import PatternError
from jaxis.parsing.ecma_regex import full_match, rust_searches
from jaxis.parsing.json_schema import ANNOTATIONS, DEFINITIONS, conjuncts, types
from jaxis.parsing.tool_parsers.tools import FunctionTool
from jaxis.tokenizer import Tokenizer

ANY_TEXT = "/(?s:.*)/"
# The values of these keys: schemas under arbitrary names, and values that are not schemas.
_NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})
_VALUES = frozenset({"const", "enum"})
_OBJECT_KEYS = frozenset({"type", "properties", "required", "additionalProperties"})
_MAX_OPTIONS = 256
_STRING_KEYS = frozenset({"type", "enum", "const", "pattern", "minLength", "maxLength", "format", "anyOf", "oneOf"})
_REGEX_SPECIAL = re.compile(r"[^\w\s<>\"'`=,:;!@%&_ -]|[\n\r\t]", re.ASCII)


class UnwritableCallError(Exception):
    """A format cannot express a schema, or this grammar cannot ensure it."""


class CallGrammar:
    """Writer of one grammar, rule by rule. A format returns expressions; equal rules become one.

    Args:
      tools: The functions that may be called, at least one.
      special_tokens: The tokenizer's special tokens, by their text.
      max_calls: Maximum number of calls in an answer; None is no limit.
    """

    def __init__(
        self, tools: Sequence[FunctionTool], special_tokens: Mapping[str, int], *, max_calls: int | None = None
    ) -> None:
        self.tools = tools
        self.max_calls = max_calls
        self._special_tokens = special_tokens
        self._pattern = _any_of(special_tokens)
        self._names: dict[str, str] = {}

    def source(self, start: str) -> str:
        """Returns the grammar whose answers match an expression."""
        rules = (f"{name}{body}" for body, name in self._names.items())
        return "\n".join((f"start: {start}", *rules, ""))

    def rule(self, body: str, options: str = "") -> str:
        return self._named(f"{options}: {body}", "r")

    def terminal(self, body: str) -> str:
        """Returns the name of a terminal with this body, which the lexer reads as one."""
        return self._named(f": {body}", "T")

    def _named(self, body: str, prefix: str) -> str:
        return self._names.setdefault(body, f"{prefix}{len(self._names)}")

    # Text and tokens.

    def has_token(self, text: str) -> bool:
        return text in self._special_tokens

    def text(self, text: str) -> str:
        """Returns the format's own text, with markers as tokens where the tokenizer has them."""
        return " ".join(self._piece(piece) for piece in self._pieces(text)) or '""'

    def _pieces(self, text: str) -> list[str]:
        return [piece for piece in self._pattern.split(text) if piece] if self._pattern else [text]

    def _piece(self, piece: str) -> str:
        token_id = self._special_tokens.get(piece)
        return literal(piece) if token_id is None else f"<[{token_id}]>"

    def free_text(self, *markers: str) -> str:
        """Returns any text and any special tokens except these markers."""
        return self.rule(f"{ANY_TEXT} {self.more_free_text(*markers)}")

    def more_free_text(self, *markers: str) -> str:
        """Returns a continuation of text from a special token on, as `free_text` allows it."""
        ids = self._token_ids_but(markers)
        return f"(<[{_ranges(ids)}]> {ANY_TEXT})*" if ids else ""

    def _token_ids_but(self, markers: Iterable[str]) -> list[int]:
        return sorted(set(self._special_tokens.values()) - {self._special_tokens.get(marker) for marker in markers})

    def free_text_up_to(self, opening: str, markers: Sequence[str]) -> str:
        """Any text without these markers up to an opening's first one, which ends it, and the rest of the opening.

        An opening without a marker ends the text where it first occurs.
        """
        _, pieces = self._first_marker(opening)
        if pieces:
            # What comes before the marker cannot be told from free text.
            return self.rule(" ".join((self.free_text(*markers), *map(self._piece, pieces))))
        ids = self._token_ids_but(markers)
        before = f"({ANY_TEXT} <[{_ranges(ids)}]>)* " if ids else ""
        return self.rule(before + self.rule(f"/(?s:.*){escape_regex(opening)}/", "[lazy]"))

    def first_marker(self, text: str) -> str:
        """Returns the first special token in a string; empty if there is none."""
        return next(iter(self._first_marker(text)[1]), "")

    def _first_marker(self, text: str) -> tuple[str, list[str]]:
        """Splits a string into the part before the first special token and the pieces from there on."""
        pieces = self._pieces(text)
        at = next((index for index, piece in enumerate(pieces) if piece in self._special_tokens), len(pieces))
        return "".join(pieces[:at]), pieces[at:]

    def _up_to(self, text: str, end: str, *, lazy: str = "") -> str:
        """Text that matches a terminal's body, and then the end: one lexeme, up to a special token in the end.

        With `lazy`, a terminal's body of any text with the end, it ends where the end first occurs.
        """
        before, markers = self._first_marker(end)
        if lazy and not markers:
            return self.rule(lazy, "[lazy]")
        lexeme = self.terminal(f"({text}) {literal(before)}" if before else text)
        return " ".join((lexeme, *map(self._piece, markers)))

    def choice(self, options: Iterable[str]) -> str:
        options = list(dict.fromkeys(options))
        return options[0] if len(options) == 1 else f"({' | '.join(options)})"

    def listed(self, items: Sequence[tuple[str, bool]], separator: str) -> str:
        """Returns items (expression, is required) in their order with separators; optional ones may be missing."""
        first = after = '""'
        for item, is_required in reversed(items):
            follows = self.rule(f"{separator} {item} {after}" + ("" if is_required else f" | {after}"))
            first = self.rule(f"{item} {after}" + ("" if is_required else f" | {first}"))
            after = follows
        return first

    def repeated(self, item: str, separator: str = "") -> str:
        """Returns at least one call, up to the maximum of an answer, with a separator between them."""
        more = f"({separator} {item})"
        if self.max_calls == 1:
            return item
        return f"{item} {more}*" if self.max_calls is None else f"{item} {more}{{0,{self.max_calls - 1}}}"

    # Values.

    def json(self, schema: Mapping[str, Any]) -> str:
        """Returns the name of a rule for JSON that is valid under the schema; references are relative to it."""
        return self.rule(f"%json {escape_source(json.dumps(schema, ensure_ascii=False))}")

    def json_calls(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """Returns the name of a rule for a non-empty JSON array of calls, by schemas of `call_schema`."""
        items = {"anyOf": [moved(call, f"#/items/anyOf/{i}") for i, call in enumerate(calls)]}
        schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": items}
        return self.json(schema if self.max_calls is None else {**schema, "maxItems": self.max_calls})

    def json_call(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """Returns the name of a rule for a JSON object of one of these schemas, as `call_schema` makes them."""
        return self.json({"anyOf": [moved(call, f"#/anyOf/{i}") for i, call in enumerate(calls)]})

    def json_argument(self, tool: FunctionTool, schema: Mapping[str, Any]) -> str:
        """Returns the name of a rule for the JSON of one of a function's arguments, or of a part of it."""
        if '"$ref"' not in json.dumps(schema):
            return self.json(moved(schema, "#"))
        return self.json({**moved(schema, "#/$defs/root"), "$defs": {"root": moved(tool.parameters, "#/$defs/root")}})

    def verbatim_string(
        self,
        tool: FunctionTool,
        schema: Mapping[str, Any],
        end: str,
        *,
        break_before_end: bool = False,
        without: Sequence[str] = (),
    ) -> str:
        """Returns a string without quotes or escapes, up to and including the marker `end`, which it cannot contain.

        References are relative to the function's parameters; the schema's `format` has no effect. With
        `break_before_end`, a line break before the end is not part of the string. It contains no markers `without`,
        unless its length or pattern is limited. Raises UnwritableCallError if the schema has a keyword that is not
        supported.
        """
        last = "\n" + end if break_before_end else end
        without = [end, *(marker for marker in without if not self.first_marker(marker))]
        options = [self._verbatim_option(parts, without, last) for parts in _string_options(schema, tool.parameters)]
        if not any(options):
            raise UnwritableCallError("a string that no value fits")
        return self.choice(option for option in options if option)

    def _verbatim_option(self, parts: Sequence[Mapping[str, Any]], without: Sequence[str], last: str) -> str:
        """Returns a string valid under all of these schemas, and its end; empty if there is none."""
        end = without[0]
        low = max((part.get("minLength", 0) for part in parts), default=0)
        high = min((part["maxLength"] for part in parts if "maxLength" in part), default=None)
        searches = [search for part in parts if "pattern" in part for search in _searches(part["pattern"])]
        values = [
            [part["const"]] if "const" in part else part["enum"] for part in parts if {"const", "enum"} & part.keys()
        ]
        if values:
            strings = [
                value
                for value in values[0]
                if isinstance(value, str)
                and not any(marker in value for marker in without)
                and all(value in others for others in values)
                and low <= len(value) <= (len(value) if high is None else high)
            ]
            if not strings or not searches:
                return f"{self.choice(map(literal, strings))} {self.text(last)}" if strings else ""
            listed = f"/({'|'.join(map(escape_regex, strings))})/"
            return self._up_to(" & ".join([listed, *searches]), last)
        if not low and high is None and not searches:
            refused = f" & {_without(without[1:])}" if without[1:] else ""
            return self._up_to(ANY_TEXT + refused, end, lazy=f"/(?s:.*){escape_regex(end)}/{refused}")
        bodies = [f"/(?s:.{{{low},{'' if high is None else high}}})/", *searches]
        if not self.first_marker(end):
            bodies.append(_without([end]))  # the other markers too would be more than the lexer takes
        return self._up_to(" & ".join(bodies), last)


def tool_arguments(
    tool: FunctionTool, schema: Mapping[str, Any] | None = None
) -> list[tuple[str, Mapping[str, Any], bool]]:
    """Returns a function's arguments, or those of an object within them, in order: (name, schema, is required).

    Raises UnwritableCallError if the schema constrains its object in other ways too.
    """
    properties: dict[str, Any] = {}
    required: dict[str, None] = {}
    parts = conjuncts(tool.parameters if schema is None else schema, tool.parameters)
    for part in parts:
        keywords = part.keys() if isinstance(part, Mapping) else {"false"}
        if unknown := keywords - _OBJECT_KEYS - ANNOTATIONS - DEFINITIONS:
            raise UnwritableCallError(f"{min(unknown)} of the arguments")
        if len(parts) > 1 and part.get("additionalProperties", True) is not True:
            raise UnwritableCallError("additionalProperties of a part of the arguments")
        for name, value in part.get("properties", {}).items():
            properties[name] = {"allOf": [properties[name], value]} if name in properties else value
        required |= dict.fromkeys(part.get("required", ()))
    more = parts[0].get("additionalProperties", True) if len(parts) == 1 else True
    for name in required:
        properties.setdefault(name, more)
    return [(name, _as_mapping(value), name in required) for name, value in properties.items()]


def _string_options(schema: object, root: object) -> list[list[Mapping[str, Any]]]:
    """Returns alternatives of a string's schema: in each, all schemas hold, and none has alternatives."""
    options: list[list[Mapping[str, Any]]] = [[]]
    for part in conjuncts(schema, root):
        if part is False or "string" not in types({key: value for key, value in part.items() if key == "type"}, root):
            return []
        if unknown := part.keys() - _STRING_KEYS - ANNOTATIONS - DEFINITIONS:
            raise UnwritableCallError(f"{min(unknown)} of a string")
        plain = {key: value for key, value in part.items() if key not in ("anyOf", "oneOf")}
        options = [[*option, plain] for option in options]
        for keyword in ("anyOf", "oneOf"):
            if keyword in part:
                inner = [parts for item in part[keyword] for parts in _string_options(item, root)]
                options = [[*option, *parts] for option in options for parts in inner]
        if len(options) > _MAX_OPTIONS:
            raise UnwritableCallError(f"a string of more than {_MAX_OPTIONS} alternatives")
    return options


def call_schema(
    tool: FunctionTool,
    name_key: str = "name",
    arguments_key: str = "arguments",
    before: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns the JSON schema of a call, {"name": "f", "arguments": {...}}, with other keys or properties before it."""
    properties = {
        **(before or {}),
        name_key: {"const": tool.name},
        arguments_key: moved(tool.parameters, f"#/properties/{arguments_key}"),
    }
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def moved(schema: object, place: str) -> Any:
    """Returns a schema without annotations, with internal references rewritten for its place in another schema."""
    if isinstance(schema, list):
        return [moved(item, place) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    result: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMED_SCHEMAS and isinstance(value, Mapping):
            result[key] = {name: moved(item, place) for name, item in value.items()}
        elif key == "$ref" and isinstance(value, str) and value.startswith("#"):
            result[key] = place + value[1:]
        # The first two are only meaningful at the root of a document, which this no longer is.
        elif key not in ("$id", "$schema") and key not in ANNOTATIONS:
            result[key] = value if key in _VALUES else moved(value, place)
    return result


def literal(text: str) -> str:
    """Returns a string of ordinary text in Lark's syntax."""
    return escape_source(json.dumps(text, ensure_ascii=False))


def escape_regex(text: str) -> str:
    """Returns a regular expression that matches exactly this string."""
    return escape_source(_REGEX_SPECIAL.sub(lambda match: f"\\x{{{ord(match[0]):x}}}", text), "\\x{%x}")


@functools.lru_cache(maxsize=16)
def special_tokens(tokenizer: Tokenizer) -> Mapping[str, int]:
    return {
        tokenizer.token_bytes(token_id).decode("utf-8", errors="replace"): token_id
        for token_id in sorted(tokenizer.special_token_ids, reverse=True)
    }


def escape_source(text: str, escape: str = "\\u%04x") -> str:
    """Escapes a string so that it is not read as the grammar's syntax: GBNF has ::=, and %json embeds a schema."""
    return text.replace("%", escape % ord("%")).replace("::=", (escape % ord(":")) + ":=")


def _searches(pattern: str) -> list[str]:
    """Returns regular expressions that are all found in a string in which a schema's pattern is found."""
    try:
        texts = [escape_source(full_match(search), "\\x{%x}") for search in rust_searches(pattern)]
    except PatternError as error:
        raise UnwritableCallError(f"the pattern {pattern!r} with {error}") from None
    return [f"/{text}/" for text in texts]


def _without(markers: Iterable[str]) -> str:
    """Returns a terminal's body of text in which none of these markers occurs."""
    return f"~/(?s:.*)({'|'.join(map(escape_regex, markers))})(?s:.*)/"


def _as_mapping(schema: object) -> Mapping[str, Any]:
    if schema is False:
        raise UnwritableCallError("an argument that no value fits")
    return schema if isinstance(schema, Mapping) else {}


def _any_of(tokens: Iterable[str]) -> re.Pattern[str] | None:
    """Returns a pattern with a group of one of the tokens, the longest if several begin alike."""
    alternatives = "|".join(re.escape(token) for token in sorted(filter(None, tokens), key=len, reverse=True))
    return re.compile(f"({alternatives})") if alternatives else None


def _ranges(ids: Sequence[int]) -> str:
    """Returns ascending ids as Lark's list of ranges."""
    ranges: list[list[int]] = []
    for token_id in ids:
        if ranges and token_id == ranges[-1][1] + 1:
            ranges[-1][1] = token_id
        else:
            ranges.append([token_id, token_id])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)
