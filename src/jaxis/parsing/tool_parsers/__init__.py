"""Tool-call parsers, which find the calls in a model's text; one file per format."""

from __future__ import annotations

from jaxis.errors import ConfigError
from jaxis.parsing.tool_parsers.base import ToolParser
from jaxis.parsing.tool_parsers.call_list import CallListToolParser
from jaxis.parsing.tool_parsers.cohere import CohereToolParser, CommandRToolParser
from jaxis.parsing.tool_parsers.deepseek import DeepSeekToolParser
from jaxis.parsing.tool_parsers.deepseek_v32 import DeepSeekV32ToolParser
from jaxis.parsing.tool_parsers.gemma4 import Gemma4ToolParser
from jaxis.parsing.tool_parsers.glm import GLMToolParser
from jaxis.parsing.tool_parsers.granite import GraniteToolParser
from jaxis.parsing.tool_parsers.harmony import HarmonyToolParser
from jaxis.parsing.tool_parsers.hermes import HermesToolParser
from jaxis.parsing.tool_parsers.kimi import KimiToolParser
from jaxis.parsing.tool_parsers.llama import LlamaToolParser
from jaxis.parsing.tool_parsers.mistral import MistralToolParser
from jaxis.parsing.tool_parsers.qwen3_coder import Qwen3CoderToolParser

# The names are those that other servers use, where they have one.
TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "cohere_command3": CohereToolParser,
    "cohere_command4": CohereToolParser,
    "cohere_command_r": CommandRToolParser,
    "deepseek_v3": DeepSeekToolParser,
    "deepseek_v31": DeepSeekToolParser,
    "deepseek_v32": DeepSeekV32ToolParser,
    "gemma4": Gemma4ToolParser,
    "glm45": GLMToolParser,
    "granite": GraniteToolParser,
    "hermes": HermesToolParser,
    "kimi_k2": KimiToolParser,
    "llama3_json": LlamaToolParser,
    "mistral": MistralToolParser,
    "openai": HarmonyToolParser,
    "phi4_mini_json": CallListToolParser,
    "qwen3_coder": Qwen3CoderToolParser,
}


def get_tool_parser(name: str) -> type[ToolParser]:
    """Returns the parser class of this name.

    Raises:
      ConfigError: There is no such parser.
    """
    if name not in TOOL_PARSERS:
        raise ConfigError(f"tool_call_parser={name!r} is unknown; choose one of {', '.join(TOOL_PARSERS)}")
    return TOOL_PARSERS[name]
