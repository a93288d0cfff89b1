"""Tool-call parsers: from a model's text to its calls, one file a format."""

from __future__ import annotations

from jaxis.errors import ConfigError
from jaxis.server.tool_parsers.base import ToolParser
from jaxis.server.tool_parsers.hermes import HermesToolParser

TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesToolParser,
}


def get_tool_parser(name: str) -> type[ToolParser]:
    """The parser of this name.

    Raises:
      ConfigError: There is none.
    """
    if name not in TOOL_PARSERS:
        raise ConfigError(f"tool_call_parser={name!r} is unknown; choose one of {', '.join(TOOL_PARSERS)}")
    return TOOL_PARSERS[name]
