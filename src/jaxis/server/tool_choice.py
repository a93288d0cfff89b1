"""What a chat request says about tools: which there are, whether the model may or must call them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxis.server.errors import ParameterError
from jaxis.server.protocol.chat import ChatCompletionRequest
from jaxis.server.protocol.tools import NamedToolChoice
from jaxis.server.served_model import ServedModel
from jaxis.server.tool_parsers import ToolParser
from jaxis.server.tool_parsers.forced import (
    NamedToolParser,
    RequiredToolParser,
    arguments_schema,
    required_calls_schema,
)
from jaxis.server.tool_parsers.tools import FunctionTool, function_tools


@dataclass(frozen=True)
class ToolChoice:
    """How an answer may call tools.

    Attributes:
      tools: Those that it may call.
      parser: Of the calls in its text; None if there will be none.
      json_schema: Of the text, where it must be nothing but calls.
    """

    tools: Sequence[FunctionTool] = ()
    parser: type[ToolParser] | None = None
    json_schema: dict[str, Any] | None = None


def choose_tools(request: ChatCompletionRequest, model: ServedModel) -> ToolChoice:
    """What a request's tools, tool_choice and parallel_tool_calls ask for.

    Raises:
      RequestError: A tool is none, or the model cannot be asked so.
    """
    choice = request.tool_choice or "auto"
    if not request.tools:
        if choice not in ("auto", "none"):
            raise ParameterError("tool_choice", "tool_choice needs tools to choose from: send tools, or leave it out")
        return ToolChoice()
    tools = function_tools([tool.model_dump() for tool in request.tools])
    if choice == "none":
        return ToolChoice()
    if model.tokenizer and not any("tools" in template for template in model.tokenizer.chat_templates.values()):
        raise ParameterError("tools", "tools cannot be honoured: the model's chat template does not show them")
    if isinstance(choice, NamedToolChoice):
        named = [tool for tool in tools if tool.name == choice.function.name]
        if not named:
            raise ParameterError("tool_choice", f"tool_choice names {choice.function.name[:100]!r}, which is no tool")
        return ToolChoice(named, NamedToolParser, arguments_schema(named[0]))
    if choice == "required":
        max_calls = 1 if request.parallel_tool_calls is False else None
        return ToolChoice(tools, RequiredToolParser, required_calls_schema(tools, max_calls))
    if not model.tool_format_known:
        raise ParameterError(
            "tools",
            "tools need the format of the model's calls, and its chat template has none that is known: start with"
            ' --tool-call-parser, or send tool_choice "required" or "none"',
        )
    return ToolChoice(tools, model.tool_parser)
