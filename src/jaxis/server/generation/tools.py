"""How a request's tools, and the choice between them, are honoured by the served model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxis.errors import RequestError
from jaxis.parsing.tool_choice import plan_tools
from jaxis.parsing.tool_parsers.base import ToolParser
from jaxis.parsing.tool_parsers.tools import FunctionTool, checked_functions
from jaxis.server.generation.grammar import AnswerGrammar
from jaxis.server.generation.served_model import ServedModel
from jaxis.tokenizer import Tokenizer


class ToolsNotSupportedError(RequestError):
    """A request has tools, and the model, or what is known of it, has no use for them.

    Attributes:
      model: The model's name.
    """

    def __init__(self, message: str, model: str) -> None:
        super().__init__(message, param="tools")
        self.model = model


@dataclass(frozen=True)
class ToolUse:
    """How an answer may call tools.

    Attributes:
      tools: The tools that it may call.
      parser: Parses the calls in its text; None if there are none to look for.
      grammar: What the whole answer follows, if it must call.
      call_tokens: Tokens that begin a call and nothing else; empty if calls begin as ordinary text does.
      parallel: Whether calls after the first one count.
    """

    tools: Sequence[FunctionTool] = ()
    parser: type[ToolParser] | None = None
    grammar: AnswerGrammar | None = None
    call_tokens: Sequence[int] = ()
    parallel: bool = True


NO_TOOLS = ToolUse()


def choose_tools(
    model: ServedModel,
    functions: Mapping[str, Mapping[str, Any]],
    choice: str | Mapping[str, Any] | None,
    *,
    parallel: bool = True,
) -> ToolUse:
    """How an answer may call the functions that a request offers.

    Args:
      model: The served model.
      functions: As `checked_functions` takes them.
      choice: As `plan_tools` takes it.
      parallel: Whether an answer may contain more than one call.

    Raises:
      RequestError: A function is invalid, or the served model does not support the choice.
    """
    plan = plan_tools(checked_functions(functions), choice, parallel_tool_calls=parallel)
    if plan.mode == "none":
        return ToolUse(parallel=parallel)
    if model.tokenizer and not any("tools" in template for template in model.tokenizer.chat_templates.values()):
        raise ToolsNotSupportedError("cannot be honoured: the model's chat template does not show them", model.name)
    if plan.mode == "auto" and not model.parsers.tool_format_known:
        raise ToolsNotSupportedError(
            "need the format of the model's calls, and its chat template has none that is known: start with "
            "--tool-call-parser, demand a call, or leave the tools out",
            model.name,
        )
    parser = plan.parser or model.parsers.tool
    grammar = None
    if plan.json_schema is not None:
        grammar = AnswerGrammar.of("tools", json_schema=dict(plan.json_schema))
    return ToolUse(plan.tools, parser, grammar, _call_tokens(parser, model.tokenizer), parallel)


def _call_tokens(parser: type[ToolParser] | None, tokenizer: Tokenizer | None) -> list[int]:
    if parser is None or tokenizer is None:
        return []
    ids = (tokenizer.token_to_id(marker) for marker in parser.call_markers)
    return [token_id for token_id in ids if token_id is not None]
