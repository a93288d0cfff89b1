"""Tools of /v1/responses: functions, namespaces of functions, and tools whose input is free text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from jaxis.server.http.body import LenientModel, StrictModel
from jaxis.server.openai.fields import FunctionDefinition

_OWN_TYPES = ("function", "custom", "namespace")


class ResponseTool(FunctionDefinition):
    """A function that the model may call."""

    type: Literal["function"]


class FreeInput(StrictModel):
    """Free text as a tool's input."""

    type: Literal["text"]


class GrammarInput(StrictModel):
    """Input that follows a grammar, in Lark's syntax or as a regular expression."""

    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: str


class CustomTool(LenientModel):
    """A tool whose input is text instead of a JSON object.

    Attributes:
      format: Format of the input. The model reads it; an answer that must call the tool follows it.
    """

    type: Literal["custom"]
    name: str
    description: str | None = None
    format: Annotated[FreeInput | GrammarInput, Field(discriminator="type")] | None = None


class Namespace(LenientModel):
    """Tools under a common name, such as those of one MCP server. Its description is not shown to the model."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: list[Annotated[ResponseTool | CustomTool, Field(discriminator="type")]]


class HostedTool(BaseModel):
    """A tool that OpenAI's servers run, such as web_search. It is left out: this server has none."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Annotated[str, Field(json_schema_extra={"not": {"enum": list(_OWN_TYPES)}})]


def _tool_type(value: object) -> Any:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if kind in _OWN_TYPES or not isinstance(kind, str) else "hosted"


AnyTool = Annotated[
    Annotated[ResponseTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[Namespace, Tag("namespace")]
    | Annotated[HostedTool, Tag("hosted")],
    Discriminator(_tool_type),
]


class NamedTool(StrictModel):
    """The tool that must be called."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


@dataclass(frozen=True)
class OfferedTool:
    """A tool of the request, and the function that the model sees in its place.

    Attributes:
      place: Place in the request, such as "tools[0]".
      name, namespace: Names of the tool and of its namespace for the client.
      function: Function in the form of chat templates.
      custom: The tool, if its input is text.
    """

    place: str
    name: str
    namespace: str | None
    function: Mapping[str, Any]
    custom: CustomTool | None = None

    @property
    def function_name(self) -> str:
        return function_name(self.name, self.namespace)

    @property
    def for_template(self) -> dict[str, Any]:
        return {"type": "function", "function": self.function}


def function_name(name: str, namespace: str | None) -> str:
    """Returns the name under which the model sees a tool."""
    return f"{namespace}__{name}" if namespace else name


def offered_tools(tools: Sequence[Any] | None) -> list[OfferedTool]:
    """Returns the tools (`AnyTool`) that the model sees."""
    offered = []
    for i, tool in enumerate(tools or ()):
        if isinstance(tool, Namespace):
            offered += [_offered(inner, tool.name, f"tools[{i}].tools[{j}]") for j, inner in enumerate(tool.tools)]
        elif not isinstance(tool, HostedTool):
            offered.append(_offered(tool, None, f"tools[{i}]"))
    return offered


def hosted_types(tools: Sequence[Any] | None) -> list[str]:
    return [tool.type for tool in tools or () if isinstance(tool, HostedTool)]


def _offered(tool: ResponseTool | CustomTool, namespace: str | None, place: str) -> OfferedTool:
    name = {"name": function_name(tool.name, namespace)}
    if isinstance(tool, CustomTool):
        function = {**name, "description": _custom_description(tool), "parameters": _CUSTOM_PARAMETERS}
        return OfferedTool(place, tool.name, namespace, function, tool)
    function = {**name, **tool.model_dump(exclude={"type", "name"}, exclude_unset=True)}
    return OfferedTool(place, tool.name, namespace, function)


_CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The tool's input, as plain text."}},
    "required": ["input"],
    "additionalProperties": False,
}


def _custom_description(tool: CustomTool) -> str:
    parts = [tool.description] if tool.description else []
    if isinstance(tool.format, GrammarInput):
        what = "Lark grammar" if tool.format.syntax == "lark" else "regular expression"
        parts.append(f"The input follows this {what}:\n{tool.format.definition}")
    return "\n\n".join(parts)


def custom_arguments(text: str) -> str:
    return json.dumps({"input": text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """Returns the input in the arguments of a custom tool's function; other arguments are returned unchanged.

    The client reports errors in such an input to the model, since the server does not know the tool's format.
    """
    for end in ("", '"}'):  # a call that was cut off may lack its end
        try:
            value = json.loads(arguments + end, strict=False)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and isinstance(text := value.get("input"), str):
            return text
    return arguments
