"""Constraints on a completion: a JSON schema, a regular expression, one of several strings, or a grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxis.errors import RequestError

KINDS = ("json_schema", "json_object", "regex", "choice", "grammar")
# Far more than anybody writes by hand; these limits bound the work of one request.
MAX_SCHEMA_CHARACTERS = 128 * 1024
MAX_SCHEMA_DEPTH = 64
MAX_REGEX_CHARACTERS = 8 * 1024
MAX_GRAMMAR_CHARACTERS = 128 * 1024
MAX_CHOICES = 4096
MAX_CHOICE_CHARACTERS = 64 * 1024


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """A constraint on a completion; exactly one attribute is set.

    Attributes:
      json_schema: A JSON schema, as a dict or as JSON text.
      json_object: Any JSON object.
      regex: A regular expression that the whole text matches.
      choice: Strings, one of which the text must be.
      grammar: A grammar in Lark's syntax, or in EBNF as GBNF writes it.
    """

    json_schema: dict[str, Any] | str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    # The attribute as a string: equal strings of the same kind are the same grammar.
    _source: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.json_object, bool):
            raise RequestError(f"={self.json_object!r} must be true or false", param="structured_outputs.json_object")
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            what = " and ".join(given) or "nothing"
            raise RequestError(f"has {what}: give exactly one of {', '.join(KINDS)}", param="structured_outputs")
        object.__setattr__(self, "_source", getattr(self, f"_checked_{given[0]}")())

    @property
    def kind(self) -> str:
        """Name of the attribute that is set, one of `KINDS`."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))

    @property
    def source(self) -> str:
        """The attribute as a string: JSON for a schema and for choices."""
        return self._source

    def _checked_json_schema(self) -> str:
        name = "structured_outputs.json_schema"
        schema, text = self.json_schema, self.json_schema
        if isinstance(text, str):
            _check_length(name, text, MAX_SCHEMA_CHARACTERS)
            try:
                schema = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise RequestError(f"is not JSON: {error}", param=name) from None
        if not isinstance(schema, dict):
            raise RequestError(f"must be a JSON object, not {type(schema).__name__}", param=name)
        if _is_deeper(schema, MAX_SCHEMA_DEPTH):
            raise RequestError(f"is nested more than {MAX_SCHEMA_DEPTH} levels deep: flatten it", param=name)
        try:
            # Keys keep their order: it is the order in which properties are generated.
            text = json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        except (TypeError, ValueError) as error:
            raise RequestError(f"cannot be written as JSON: {error}", param=name) from None
        _check_length(name, text, MAX_SCHEMA_CHARACTERS)
        return text

    def _checked_json_object(self) -> str:
        return "{}"

    def _checked_regex(self) -> str:
        return _checked_text("structured_outputs.regex", self.regex, MAX_REGEX_CHARACTERS)

    def _checked_grammar(self) -> str:
        return _checked_text("structured_outputs.grammar", self.grammar, MAX_GRAMMAR_CHARACTERS)

    def _checked_choice(self) -> str:
        name = "structured_outputs.choice"
        if not isinstance(self.choice, list | tuple) or not all(isinstance(c, str) and c for c in self.choice):
            raise RequestError("must be a list of non-empty strings", param=name)
        if not self.choice:
            raise RequestError("is empty: give at least one string", param=name)
        if len(self.choice) > MAX_CHOICES:
            raise RequestError(f"has {len(self.choice)} strings, and at most {MAX_CHOICES} are allowed", param=name)
        _check_length(name, "".join(self.choice), MAX_CHOICE_CHARACTERS)
        return json.dumps(list(dict.fromkeys(self.choice)), ensure_ascii=False)


def _checked_text(name: str, text: object, limit: int) -> str:
    if not isinstance(text, str) or not text.strip():
        raise RequestError("must be a non-empty string", param=name)
    _check_length(name, text, limit)
    return text


def _check_length(name: str, text: str, limit: int) -> None:
    if len(text) > limit:
        raise RequestError(f"has {len(text)} characters, and at most {limit} are allowed", param=name)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(f"holds a lone surrogate {text[error.start]!a}: send valid Unicode", param=name) from None


def _is_deeper(value: object, depth: int) -> bool:
    """Returns whether dicts and lists are nested more than `depth` levels deep."""
    level = [value]
    for _ in range(depth + 1):
        containers = [v for v in level if isinstance(v, Mapping | list | tuple)]
        if not containers:
            return False
        level = [child for v in containers for child in (v.values() if isinstance(v, Mapping) else v)]
    return True
