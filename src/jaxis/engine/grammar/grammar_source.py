"""Translation of `StructuredOutputs` into the grammars that llguidance compiles."""

from __future__ import annotations

import json
import logging
import re

from llguidance import LLMatcher, regex_to_lark
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from jaxis.engine.grammar.json_schema import Schema, rewritten
from jaxis.errors import RequestError
from jaxis.parsing.tool_parsers.call_grammar import escape_source
from jaxis.structured_outputs import StructuredOutputs

# One space, or a new line with its indentation: the two styles of JSON that models write. With unbounded white space,
# a small model may fill its whole answer with it.
JSON_WHITESPACE = r" |\n[ \t]{0,40}"
_JSON_OPTIONS = {"lenient": False, "coerce_one_of": False, "whitespace_pattern": JSON_WHITESPACE}
# A mask allows every token that can continue the text, not only the one that the tokenizer would choose where the text
# is certain, because its normalizer may spell it differently. At the end, so that line numbers in errors stay right.
_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
_EMBEDDED_SCHEMA = re.compile(r"%json\s*")
_logger = logging.getLogger(__name__)
_SCHEMA = "structured_outputs.json_schema"


def grammar_source(spec: StructuredOutputs) -> tuple[str, frozenset[str]]:
    """Returns the grammar in llguidance's dialect of Lark, and the keywords of schemas that it does not ensure.

    Compiling may still find it invalid.

    Raises:
      RequestError: The grammar uses something unsupported.
    """
    ignored: set[str] = set()
    if spec.kind == "json_schema":
        schema = json.loads(spec.source)
        if "x-guidance" in schema:
            raise RequestError("has x-guidance, which is not supported: leave it out", param=_SCHEMA)
        source = _json_grammar(_rewritten(schema, _SCHEMA, ignored))
    elif spec.kind == "json_object":
        source = _json_grammar({"type": "object"})
    elif spec.kind == "regex":
        source = _regex_grammar(spec.source)
    elif spec.kind == "choice":
        source = _regex_grammar("|".join(f"(?:{_escape(text)})" for text in json.loads(spec.source)))
    else:
        source = _lark_grammar(spec.source, ignored)
    return LLMatcher.grammar_from_lark(source + _NO_FORCING), frozenset(ignored)


def _rewritten(schema: object, name: str, ignored: set[str]) -> Schema:
    """Returns the schema as llguidance reads it; notes and logs the keywords that it does not ensure."""
    result, found = rewritten(schema, name)
    if found:
        _logger.info("%s has %s, which the answer is not held to", name, ", ".join(sorted(found)))
    ignored |= found
    return result


def _json_grammar(schema: Schema) -> str:
    return f"start: %json {_with_options(schema)}"


def _with_options(schema: Schema) -> str:
    """Returns the schema's text, with llguidance's options added at its end, where they do not move other keys."""
    keys = schema if isinstance(schema, dict) else {} if schema else {"enum": []}
    return json.dumps({**keys, "x-guidance": _JSON_OPTIONS}, ensure_ascii=False, separators=(",", ":"))


def _regex_grammar(regex: str) -> str:
    return f"start: /{regex_to_lark(regex)}/"


def _lark_grammar(text: str, ignored: set[str]) -> str:
    """Returns the grammar, with the options of all schemas added to those that it embeds."""
    pieces, at = [], 0
    for match in _EMBEDDED_SCHEMA.finditer(text):
        try:
            schema, end = json.JSONDecoder().raw_decode(text, match.end())
        except (ValueError, RecursionError):
            line = text.count("\n", 0, match.start()) + 1
            raise RequestError(
                f": line {line}: %json must be followed by a schema in JSON", param="structured_outputs.grammar"
            ) from None
        if isinstance(schema, dict) and "x-guidance" not in schema:
            written = escape_source(_with_options(_rewritten(schema, "structured_outputs.grammar", ignored)))
            pieces.append(text[at : match.end()] + written)
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
    """Returns a regular expression that matches exactly this string."""
    return "".join(c if c.isalnum() or ord(c) > 0x7F else f"\\x{{{ord(c):x}}}" for c in text)
