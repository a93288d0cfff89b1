"""How an answer is made to be the input of a custom tool."""

from __future__ import annotations

import dataclasses

from jaxis.parsing.tool_parsers.text_input import TextInputToolParser
from jaxis.server.endpoints.chat_tools import ChatTools, choose_tools
from jaxis.server.endpoints.served_model import ServedModel
from jaxis.server.endpoints.structured_outputs import AnswerGrammar
from jaxis.server.protocol.chat import ChatCompletionRequest
from jaxis.server.protocol.response_tools import GrammarInput, NamedTool, offered_tools
from jaxis.server.protocol.responses import ResponseRequest


def choose_custom_tool(
    request: ResponseRequest, chat_request: ChatCompletionRequest, model: ServedModel
) -> ChatTools | None:
    """The tools of a request that must call one custom tool whose input has a grammar; None for all others.

    Such an answer is the input itself, which follows the grammar. A model that may choose writes a call in its own
    format, with the input as a string in JSON, where the grammar cannot apply: it reads the grammar in the tool's
    description.

    Raises:
      RequestError: A tool is invalid, or its grammar.
    """
    choice = request.tool_choice
    if not isinstance(choice, NamedTool):
        return None
    for offered, _ in offered_tools(request.tools):
        custom = offered.custom
        is_chosen = (offered.name, offered.namespace) == (choice.name, choice.namespace)
        if is_chosen and custom is not None and isinstance(custom.format, GrammarInput):
            tools = choose_tools(chat_request, model)
            kind = "grammar" if custom.format.syntax == "lark" else "regex"
            return dataclasses.replace(
                tools,
                tools=[tool for tool in tools.tools if tool.name == offered.function_name],
                parser=TextInputToolParser,
                grammar=AnswerGrammar.of(f"tools.{offered.name}.format.definition", {kind: custom.format.definition}),
            )
    return None
