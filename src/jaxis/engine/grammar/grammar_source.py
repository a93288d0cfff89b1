"""Translates `StructuredOutputs` into the grammars that llguidance compiles."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from llguidance import LLMatcher, regex_to_lark
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from jaxis.errors import RequestError
from jaxis.structured_outputs import StructuredOutputs

# One space, or a new line with its indentation: the two styles of JSON that models write. With unbounded white space,
# a small model may fill its whole answer with it.
JSON_WHITESPACE = r" |\n[ \t]{0,40}"
# "multipleOf: N" needs an automaton of N states, and several of these constraints multiply.
MAX_MULTIPLE_OF = 100_000
_MAX_MULTIPLE_OF_EXPONENT = 15
_MAX_INTEGER = 2**63 - 1
_JSON_OPTIONS = {"lenient": False, "coerce_one_of": False, "whitespace_pattern": JSON_WHITESPACE}
# A mask allows every token that can continue the text, not only the one that the tokenizer would choose where the text
# is certain, because its normalizer may spell it differently. At the end, so that line numbers in errors stay right.
_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
_EMBEDDED_SCHEMA = re.compile(r"%json\s*")
_SCHEMA = "structured_outputs.json_schema"


def grammar_source(spec: StructuredOutputs) -> str:
    """The grammar in llguidance's dialect of Lark; compiling may still find it invalid.

    Raises:
      RequestError: It uses something unsupported.
    """
    if spec.kind == "json_schema":
        schema = json.loads(spec.source, parse_float=Decimal)
        if "x-guidance" in schema:
            raise RequestError("has x-guidance, which is not supported: leave it out", param=_SCHEMA)
        _check_schema(schema, _SCHEMA)
        source = _json_grammar(spec.source)
    elif spec.kind == "json_object":
        source = _json_grammar('{"type":"object"}')
    elif spec.kind == "regex":
        source = _regex_grammar(spec.source)
    elif spec.kind == "choice":
        source = _regex_grammar("|".join(f"(?:{_escape(text)})" for text in json.loads(spec.source)))
    else:
        source = _lark_grammar(spec.source)
    return LLMatcher.grammar_from_lark(source + _NO_FORCING)


def _json_grammar(schema: str) -> str:
    return f"start: %json {_with_options(schema, is_empty=schema == '{}')}"


def _with_options(schema: str, *, is_empty: bool) -> str:
    """The schema's text, with llguidance's options added at its end, where they do not move other keys."""
    return f'{schema[:-1]}{"" if is_empty else ","}"x-guidance":{json.dumps(_JSON_OPTIONS)}}}'


def _regex_grammar(regex: str) -> str:
    return f"start: /{regex_to_lark(regex)}/"


def _lark_grammar(text: str) -> str:
    """The grammar, with the options of all schemas added to those that it embeds."""
    pieces, at = [], 0
    for match in _EMBEDDED_SCHEMA.finditer(text):
        try:
            schema, end = json.JSONDecoder(parse_float=Decimal).raw_decode(text, match.end())
        except (ValueError, RecursionError):
            line = text.count("\n", 0, match.start()) + 1
            raise RequestError(
                f": line {line}: %json must be followed by a schema in JSON", param="structured_outputs.grammar"
            ) from None
        _check_schema(schema, "structured_outputs.grammar")
        if isinstance(schema, dict) and "x-guidance" not in schema:
            pieces.append(text[at : match.end()] + _with_options(text[match.end() : end], is_empty=not schema))
            at = end
    text = "".join((*pieces, text[at:]))
    if "::=" not in text:
        return text
    try:
        return gbnf_to_lark(text)
    except (GbnfToLarkError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise RequestError(f"is not valid EBNF: {reason}", param="structured_outputs.grammar") from None


def _escape(text: str) -> str:
    """A regular expression that matches exactly this string."""
    return "".join(c if c.isalnum() or ord(c) > 0x7F else f"\\x{{{ord(c):x}}}" for c in text)


def _check_schema(schema: object, name: str) -> None:
    """Refuses schemas that would take hours to compile, or whose grammar would accept invalid text."""
    multiples = []
    for subschema in _objects(schema):
        if (multiple := _as_number(subschema.get("multipleOf"))) is not None:
            multiples.append(Decimal(multiple))
        _check_bounds(subschema, name)
        required = subschema.get("required", [])
        num_required = len(required) if isinstance(required, list) else 0
        # Properties that the schema does not name may be repeated, and a parser keeps only one of them.
        min_properties = _as_number(subschema.get("minProperties"))
        if min_properties is not None and min_properties > num_required + 1:
            raise RequestError(
                f": minProperties={min_properties} is not supported beyond the required properties "
                "and one more: name them in required",
                param=name,
            )
        # The drafts differ in which $id such a reference is relative to.
        ref = subschema.get("$ref")
        if isinstance(ref, str) and not ref.startswith("#") and isinstance(subschema.get("$id"), str):
            raise RequestError(
                f": $ref={ref!r} beside an $id is not supported: refer to it with #/$defs/...", param=name
            )
    if multiples and not _is_small_multiple(multiples):
        raise RequestError(
            ": multipleOf is supported where the least common multiple of all its values has at most "
            f"{len(str(MAX_MULTIPLE_OF)) - 1} digits",
            param=name,
        )


def _check_bounds(subschema: dict[str, Any], name: str) -> None:
    """Refuses whole numbers that the compiler would round: it converts them to float64, and then to 64 bits."""
    for key, beyond in (("minimum", 1), ("exclusiveMinimum", 1), ("maximum", -1), ("exclusiveMaximum", -1)):
        bound = _as_number(subschema.get(key))
        if bound is None or bound != int(bound):
            continue
        if beyond * bound >= _MAX_INTEGER or (abs(bound) < _MAX_INTEGER and int(float(bound)) != bound):
            raise RequestError(f": {key}={Decimal(bound):.6g} is not supported: it needs more than 53 bits", param=name)


def _is_small_multiple(multiples: list[Decimal]) -> bool:
    # Parsed from JSON, so they are finite, and their exponents are numbers.
    exponents = [int(multiple.as_tuple().exponent) for multiple in multiples]
    if max(abs(m.adjusted()) for m in multiples) > _MAX_MULTIPLE_OF_EXPONENT:
        return False
    if min(exponents) < -_MAX_MULTIPLE_OF_EXPONENT:
        return False
    scale = 10 ** max(0, -min(exponents))
    return math.lcm(*(int(multiple * scale) for multiple in multiples)) <= MAX_MULTIPLE_OF


def _objects(value: object) -> Iterator[dict[str, Any]]:
    stack = [value]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            yield value
            stack.extend(value.values())
        elif isinstance(value, list):
            stack.extend(value)


def _as_number(value: object) -> int | Decimal | None:
    """The value if it is a number, else None."""
    return value if isinstance(value, int | Decimal) and not isinstance(value, bool) else None
