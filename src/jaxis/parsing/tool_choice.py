from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jaxis.errors import RequestError
from jaxis.parsing.tool_parsers.base import ToolParser
from jaxis.parsing.tool_parsers.call_grammar import CallGrammar, call_schema, moved, special_tokens
from jaxis.parsing.tool_parsers.call_list import BareCallListToolParser
from jaxis.parsing.tool_parsers.tools import FunctionTool
from jaxis.tokenizer import Tokenizer


@dataclass(frozen=True)
class ToolPlan:
    """Plan for answering a request with tools.

    Attributes:
      tools: The functions that the model may call.
      json_schema: Schema of the answer after any reasoning, if the model must call and has no format of its own for
        that.
      parser: Parser of an answer that follows `json_schema`; None uses the model's own parser.
      callable_tools: The functions that the answer's grammar may contain.
      max_calls: Maximum number of calls in it; None is no limit.
    """

    mode: Literal["none", "auto", "required", "named"]
    tools: tuple[FunctionTool, ...]
    json_schema: Mapping[str, Any] | None = None
    parser: type[ToolParser] | None = None
    callable_tools: tuple[FunctionTool, ...] = ()
    max_calls: int | None = None


def plan_tools(
    tools: Sequence[FunctionTool],
    tool_choice: str | Mapping[str, Any] | None = None,
    *,
    parallel_tool_calls: bool = True,
) -> ToolPlan:
    """Plans the answer to a request by its `tool_choice`.

    Args:
      tools: The functions, as `function_tools` reads them.
      tool_choice: "none", "auto", "required", {"type": "function", "function": {"name": "f"}}, or None: "auto" if there
        are tools.
      parallel_tool_calls: True allows more than one call in an answer that must call.

    Raises:
      RequestError: The choice is none of these, or there is no such function.
    """
    if tool_choice is None:
        tool_choice = "auto" if tools else "none"
    if tool_choice == "none" or (tool_choice == "auto" and not tools):
        return ToolPlan("none", ())
    if tool_choice == "auto":
        return ToolPlan("auto", tuple(tools), callable_tools=tuple(tools), max_calls=None if parallel_tool_calls else 1)
    if not tools:
        raise RequestError("names a call to make, but tools is empty: send the functions in tools", param="tool_choice")
    if tool_choice == "required":
        max_calls = None if parallel_tool_calls else 1
        schema = required_tools_schema(tools, max_calls=max_calls)
        return ToolPlan("required", tuple(tools), schema, BareCallListToolParser, tuple(tools), max_calls)
    chosen = [tool for tool in tools if tool.name == _chosen_name(tool_choice)]
    if not chosen:
        raise RequestError(f"names {_chosen_name(tool_choice)!r}, which is not in tools", param="tool_choice")
    schema = required_tools_schema(chosen, max_calls=1)
    return ToolPlan("named", tuple(tools), schema, BareCallListToolParser, tuple(chosen), 1)


def _chosen_name(tool_choice: object) -> str:
    if isinstance(tool_choice, Mapping) and tool_choice.get("type") == "function":
        function = tool_choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(name, str):
            return name
    raise RequestError(
        'must be "none", "auto", "required" or {"type": "function", "function": {"name": "..."}}', param="tool_choice"
    )


def required_tools_schema(tools: Sequence[FunctionTool], *, max_calls: int | None = None) -> dict[str, Any]:
    """Returns the JSON schema of a list of calls, [{"name": "f", "parameters": {...}}], with at least one.

    `max_calls` is the list's maximum length; None is no limit.
    """
    calls = [moved(call_schema(tool, arguments_key="parameters"), f"#/items/anyOf/{i}") for i, tool in enumerate(tools)]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    return schema if max_calls is None else {**schema, "maxItems": max_calls}


def calls_grammar(
    parser: type[ToolParser],
    tools: Sequence[FunctionTool],
    tokenizer: Tokenizer,
    *,
    must_call: bool,
    max_calls: int | None = None,
    answer: str | None = None,
) -> str:
    """Returns the grammar of answers with calls in a model's own format, in llguidance's dialect of Lark.

    Args:
      parser: Parser of the format.
      tools: The functions that may be called, at least one.
      tokenizer: Tokenizer with the format's markers.
      must_call: True allows only calls; False allows any text, and calls in it.
      max_calls: Maximum number of calls; None is no limit.
      answer: Expression of an answer without calls; None is any text.

    Raises:
      UnwritableCallError: The format cannot express a function's schema.
    """
    grammar = CallGrammar(tools, special_tokens(tokenizer), max_calls=max_calls)
    return grammar.source(parser.write_answer(grammar, answer, must_call=must_call))
