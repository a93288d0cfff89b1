"""Selects a model's output parsers, by name or from its chat template."""

from __future__ import annotations

from dataclasses import dataclass

from jaxis.parsing.parser_detection import detect_parsers
from jaxis.parsing.reasoning_parsers import get_reasoning_parser
from jaxis.parsing.reasoning_parsers.base import ReasoningParser
from jaxis.parsing.tool_parsers import get_tool_parser
from jaxis.parsing.tool_parsers.base import ToolParser
from jaxis.tokenizer import Tokenizer

# Values in place of a parser's name: detect it from the chat template; do not parse.
AUTO, NONE = "auto", "none"


def check_parser_names(tool_parser: str, reasoning_parser: str) -> None:
    """Raises ConfigError if there is no such parser, for callers that have not loaded the model yet."""
    if tool_parser not in (AUTO, NONE):
        get_tool_parser(tool_parser)
    if reasoning_parser not in (AUTO, NONE):
        get_reasoning_parser(reasoning_parser)


@dataclass(frozen=True)
class ModelParsers:
    """How a model writes its tool calls and its reasoning.

    Attributes:
      tool: None leaves calls in the text.
      reasoning: None leaves reasoning in the text.
      tool_format_known: False if `AUTO` found no format of tool calls.
    """

    tool: type[ToolParser] | None = None
    reasoning: type[ReasoningParser] | None = None
    tool_format_known: bool = True

    @classmethod
    def select(
        cls, tokenizer: Tokenizer | None, model_type: str | None, *, tool: str = AUTO, reasoning: str = AUTO
    ) -> ModelParsers:
        """Selects parsers by name; `AUTO` detects the format from the chat templates, `NONE` does not parse.

        Raises:
          ConfigError: There is no such parser.
        """
        templates = "\n".join(tokenizer.chat_templates.values()) if tokenizer else None
        found_tool, found_reasoning = detect_parsers(templates, model_type)
        tool_name = {AUTO: found_tool, NONE: None}.get(tool, tool)
        reasoning_name = {AUTO: found_reasoning, NONE: None}.get(reasoning, reasoning)
        return cls(
            tool=get_tool_parser(tool_name) if tool_name else None,
            reasoning=get_reasoning_parser(reasoning_name) if reasoning_name else None,
            tool_format_known=tool_name is not None or tool == NONE,
        )

    @property
    def needs_special_tokens(self) -> bool:
        """Whether the text must be decoded with `skip_special_tokens=False`."""
        return any(parser is not None and parser.needs_special_tokens for parser in (self.tool, self.reasoning))
