from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from jaxis.parsing.reasoning_parsers import get_reasoning_parser
from jaxis.parsing.reasoning_parsers.base import ReasoningParser
from jaxis.parsing.template_formats import detect_parsers
from jaxis.parsing.tool_parsers import get_tool_parser
from jaxis.parsing.tool_parsers.base import ToolParser
from jaxis.tokenizer import Tokenizer

P = TypeVar("P", ToolParser, ReasoningParser)

# Values in place of a parser's name: detect it from the chat template; do not parse.
AUTO, NONE = "auto", "none"
_TAG = re.compile(r"<(/?\w+)>")
_SUFFIXED = re.compile(r"<(?:think|tool_calls?|arg_key|arg_value)(:[^\s>]+)>")


def check_parser_names(tool_parser: str, reasoning_parser: str) -> None:
    """Raises ConfigError for an unknown parser, for callers that have not loaded the model yet."""
    if tool_parser not in (AUTO, NONE):
        get_tool_parser(tool_parser)
    if reasoning_parser not in (AUTO, NONE):
        get_reasoning_parser(reasoning_parser)


@dataclass(frozen=True)
class ModelParsers:
    """Parsers of a model's tool calls and reasoning; None leaves them in the text.

    `tool_format_known` is False if `AUTO` found no format of tool calls.
    """

    tool: type[ToolParser] | None = None
    reasoning: type[ReasoningParser] | None = None
    tool_format_known: bool = True

    @classmethod
    def select(
        cls, tokenizer: Tokenizer | None, model_type: str | None, *, tool: str = AUTO, reasoning: str = AUTO
    ) -> ModelParsers:
        """Selects parsers by name. `AUTO` detects the format from the chat templates; `NONE` does not parse.

        Raises ConfigError if there is no such parser.
        """
        templates = "\n".join(tokenizer.chat_templates.values()) if tokenizer else None
        found_tool, found_reasoning = detect_parsers(templates, model_type)
        tool_name = {AUTO: found_tool, NONE: None}.get(tool, tool)
        reasoning_name = {AUTO: found_reasoning, NONE: None}.get(reasoning, reasoning)
        tool_parser = _with_suffix(get_tool_parser(tool_name), tokenizer) if tool_name else None
        reasoning_parser = _with_suffix(get_reasoning_parser(reasoning_name), tokenizer) if reasoning_name else None
        return cls(
            tool=tool_parser and _for_tokenizer(tool_parser, tool_parser.openers, tokenizer),
            reasoning=reasoning_parser
            and _for_tokenizer(reasoning_parser, (reasoning_parser.opening, *reasoning_parser.closings), tokenizer),
            tool_format_known=tool_name is not None or tool == NONE,
        )

    @property
    def needs_special_tokens(self) -> bool:
        """True if the text must be decoded with `skip_special_tokens=False`."""
        return any(parser is not None and parser.needs_special_tokens for parser in (self.tool, self.reasoning))


def _with_suffix(parser: type[P], tokenizer: Tokenizer | None) -> type[P]:
    """Returns the parser, with tags as this tokenizer has them."""
    if not parser.suffixed or tokenizer is None:
        return parser
    suffix = next((found[1] for found in map(_SUFFIXED.fullmatch, tokenizer.vocabulary) if found), "")

    def written(tags: str) -> str:
        return _TAG.sub(lambda tag: f"<{tag[1]}{suffix}>", tags)

    values = {name: getattr(parser, name) for name in parser.suffixed}
    tags = {name: written(tag) if isinstance(tag, str) else tuple(map(written, tag)) for name, tag in values.items()}
    return type(parser.__name__, (parser,), tags)


def _for_tokenizer(parser: type[P], markers: Sequence[str], tokenizer: Tokenizer | None) -> type[P]:
    """Returns the parser, adapted to the markers that are special tokens of this tokenizer.

    Models that share a format differ in them. Where the parser does not expect one, the text must be decoded with
    special tokens, and the parser leaves out those that end it.
    """
    if tokenizer is None or (parser.needs_special_tokens and not parser.suffixed):
        return parser
    has_special = any(tokenizer.token_to_id(marker) in tokenizer.special_token_ids for marker in markers)
    if not parser.needs_special_tokens and not has_special:
        return parser
    dropped = (*parser.dropped, *(token for token in tokenizer.special_tokens.values() if token not in markers))
    return type(parser.__name__, (parser,), {"needs_special_tokens": True, "dropped": dropped})
