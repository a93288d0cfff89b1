"""How a chat request's tools and tool_choice are honoured by the served model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxis.errors import RequestError
from jaxis.parsing.tool_choice import plan_tools
from jaxis.parsing.tool_parsers.base import ToolParser
from jaxis.parsing.tool_parsers.tools import FunctionTool, function_tools
from jaxis.server.endpoints.served_model import ServedModel
from jaxis.server.endpoints.structured_outputs import AnswerGrammar
from jaxis.server.http.errors import ParameterError
from jaxis.server.protocol.chat import ChatCompletionRequest
from jaxis.server.protocol.tools import NamedToolChoice


@dataclass(frozen=True)
class ChatTools:
    """How an answer may call tools.

    Attributes:
      tools: The tools that it may call.
      parser: Parses the calls in its text; None if there are none to look for.
      grammar: What the whole answer follows, if it must call.
    """

    tools: Sequence[FunctionTool] = ()
    parser: type[ToolParser] | None = None
    grammar: AnswerGrammar | None = None


def choose_tools(request: ChatCompletionRequest, model: ServedModel) -> ChatTools:
    """Interprets a request's tools, tool_choice and parallel_tool_calls.

    Raises:
      RequestError: A tool is invalid, or the served model does not support the choice.
    """
    choice = request.tool_choice
    tools = function_tools([tool.model_dump() for tool in request.tools or ()])
    try:
        plan = plan_tools(
            tools,
            choice.model_dump() if isinstance(choice, NamedToolChoice) else choice,
            parallel_tool_calls=request.parallel_tool_calls is not False,
        )
    except RequestError as error:
        raise ParameterError("tool_choice", str(error)) from None
    if plan.mode == "none":
        return ChatTools()
    if model.tokenizer and not any("tools" in template for template in model.tokenizer.chat_templates.values()):
        raise ParameterError("tools", "tools cannot be honoured: the model's chat template does not show them")
    if plan.mode == "auto" and not model.parsers.tool_format_known:
        raise ParameterError(
            "tools",
            "tools need the format of the model's calls, and its chat template has none that is known: start with"
            ' --tool-call-parser, or send tool_choice "required" or "none"',
        )
    grammar = None
    if plan.json_schema is not None:
        grammar = AnswerGrammar.of("tools", {"json_schema": dict(plan.json_schema)})
    return ChatTools(plan.tools, plan.parser or model.parsers.tool, grammar)
