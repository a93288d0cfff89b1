"""Selects a model's output parsers, by name or from its chat template."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from jaxis.parsing.reasoning_parsers import get_reasoning_parser
from jaxis.parsing.reasoning_parsers.base import ReasoningParser
from jaxis.parsing.tool_parsers import get_tool_parser
from jaxis.parsing.tool_parsers.base import ToolParser
from jaxis.tokenizer import Tokenizer

# Detects the formats of a model's tool calls and reasoning from its chat template.


# ruff: noqa: RUF001 (the bars are DeepSeek's)


# Strings that are all in a template -> tool parser; the first match counts.
_TOOL_MARKS = (
    (("<|START_ACTION|>", "<|START_TEXT|>"), "cohere_command4"),
    (("<|START_ACTION|>",), "cohere_command3"),
    (("json-formatted list of actions",), "cohere_command_r"),
    (("<|tool_call_begin|>",), "kimi_k2"),
    (("｜DSML｜",), "deepseek_v32"),
    (("<｜tool▁call▁begin｜>",), "deepseek_v3"),
    (("<|channel|>",), "openai"),
    (("<atem:",), "muse_glimmer"),
    (("<tool_call|>",), "gemma4"),
    (("<start_function_call>",), "functiongemma"),
    (("```tool_code",), "gemma3"),
    (("[func_name1(",), "pythonic"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<|tools_prefix|>",), "apertus"),
    (("<|tool_call_start|>", "```python"), "minicpm"),
    (("<|tool_call_start|>",), "lfm2"),
    (("<|tool_list_start|>",), "lfm2"),
    (("<TOOLCALL>",), "nemotron_nano_v2"),
    (("<tool_sep>",), "hy_v3"),
    (("<function_calls>",), "olmo3"),
    (("<arg_key>",), "glm45"),
    (("<function=",), "qwen3_coder"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|tool_call|>", "<|end_of_role|>"), "granite"),
    (("<|tool_call|>",), "phi4_mini_json"),
    (("<tool_call>",), "hermes"),
    (("<tool_calls>",), "hunyuan_a13b"),
    (("<|python_tag|>",), "llama3_json"),
    (('"parameters": dictionary of argument name',), "llama3_json"),
    (("<|/tool|>",), "phi4_mini_json"),
)
_REASONING_MARKS = (
    (("<|START_THINKING|>", "<|START_TEXT|>"), "cohere_command4"),
    (("<|START_THINKING|>",), "cohere_command3"),
    (("Here is my thought process:",), "granite"),
    (("</think>", "<response></response>"), "granite"),
    (("<|channel|>",), "openai_gptoss"),
    (("<atem:",), "muse_glimmer"),
    (("<channel|>",), "gemma4"),
    (("[THINK]",), "mistral"),
    (("<seed:think>",), "seed_oss"),
    (("<|inner_prefix|>",), "apertus"),
    (("<|thought_start|>",), "minicpm"),
    (("<minimax:tool_call>", "</think>"), "minimax_m2"),  # shows tools' answers between <response> tags
    (("</think>", "<answer>"), "hunyuan_a13b"),
    (("</think>", "<response>"), "ernie45"),
    (("</think>",), "deepseek_r1"),
)
# The templates of some checkpoints do not show their model's format.
_BY_MODEL_TYPE = {
    "apertus": ("apertus", "apertus"),
    "deepseek_v32": ("deepseek_v32", None),
    "gpt_oss": ("openai", "openai_gptoss"),
    "hunyuan_v1_dense": ("hunyuan_a13b", None),
    "hunyuan_v1_moe": ("hunyuan_a13b", None),
    "kimi_k2": ("kimi_k2", None),
    "kimi_k25": ("kimi_k2", None),
    "lfm2": ("lfm2", None),
    "lfm2_moe": ("lfm2", None),
    "lfm3": ("lfm2", None),
    "llama4": ("llama3_json", None),
}


def detect_parsers(chat_template: str | None, model_type: str | None = None) -> tuple[str | None, str | None]:
    """Names of the tool parser and of the reasoning parser that a model needs.

    Args:
      chat_template: Its Jinja source; a model without one has neither tools nor reasoning.
      model_type: From its configuration, for what the template does not show.

    Returns:
      For `get_tool_parser` and `get_reasoning_parser`; None if the model has no such format, or one that is not
      known here.
    """
    if not chat_template:
        return None, None
    by_type = _BY_MODEL_TYPE.get(model_type or "", (None, None))
    tool = _match(chat_template, _TOOL_MARKS) or by_type[0]
    reasoning = _match(chat_template, _REASONING_MARKS) or by_type[1]
    if reasoning == "deepseek_r1":
        reasoning = {"glm45": "glm45", "hermes": "qwen3", "kimi_k2": "kimi_k2", "qwen3_coder": "qwen3"}.get(
            tool or "", reasoning
        )
    return tool, reasoning


def _match(chat_template: str, marks: Iterable[tuple[tuple[str, ...], str]]) -> str | None:
    return next((name for strings, name in marks if all(string in chat_template for string in strings)), None)


# Selects a model's output parsers, by name or from its chat template.


P = TypeVar("P", ToolParser, ReasoningParser)

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
        tool_parser = get_tool_parser(tool_name) if tool_name else None
        reasoning_parser = get_reasoning_parser(reasoning_name) if reasoning_name else None
        return cls(
            tool=tool_parser and _for_tokenizer(tool_parser, tool_parser.openers, tokenizer),
            reasoning=reasoning_parser
            and _for_tokenizer(reasoning_parser, (reasoning_parser.opening, *reasoning_parser.closings), tokenizer),
            tool_format_known=tool_name is not None or tool == NONE,
        )

    @property
    def needs_special_tokens(self) -> bool:
        """Whether the text must be decoded with `skip_special_tokens=False`."""
        return any(parser is not None and parser.needs_special_tokens for parser in (self.tool, self.reasoning))


def _for_tokenizer(parser: type[P], markers: Sequence[str], tokenizer: Tokenizer | None) -> type[P]:
    """The parser for the markers as this tokenizer has them.

    Models that share a format do not agree on which of its markers are special tokens: where one is that the parser
    does not expect to be, the text must be decoded with special tokens, and the parser leaves out those that end it.
    """
    if parser.needs_special_tokens or tokenizer is None:
        return parser
    if not any(tokenizer.token_to_id(marker) in tokenizer.special_token_ids for marker in markers):
        return parser
    dropped = (*parser.dropped, *(token for token in tokenizer.special_tokens.values() if token not in markers))
    return type(parser.__name__, (parser,), {"needs_special_tokens": True, "dropped": dropped})
