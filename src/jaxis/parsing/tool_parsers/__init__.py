"""Tool-call parsers, which find the calls in a model's text; one file per kind of format."""

from __future__ import annotations

from jaxis.errors import ConfigError
from jaxis.parsing.tool_parsers.apertus import ApertusToolParser
from jaxis.parsing.tool_parsers.base import ToolParser
from jaxis.parsing.tool_parsers.call_list import CallListToolParser, HunyuanToolParser, NemotronNanoV2ToolParser
from jaxis.parsing.tool_parsers.cohere import CohereToolParser, CommandRToolParser
from jaxis.parsing.tool_parsers.deepseek import DeepSeekToolParser
from jaxis.parsing.tool_parsers.gemma3 import Gemma3ToolParser
from jaxis.parsing.tool_parsers.gemma4 import FunctionGemmaToolParser, Gemma4ToolParser
from jaxis.parsing.tool_parsers.glm import GLMToolParser, HunyuanV3ToolParser, HunyuanV4ToolParser
from jaxis.parsing.tool_parsers.granite import GraniteToolParser
from jaxis.parsing.tool_parsers.harmony import HarmonyToolParser
from jaxis.parsing.tool_parsers.hermes import HermesToolParser, LongcatToolParser
from jaxis.parsing.tool_parsers.inkling import InklingToolParser
from jaxis.parsing.tool_parsers.invocations import (
    DeepSeekV4ToolParser,
    DeepSeekV32ToolParser,
    DeepSeekV41ToolParser,
    MiniMaxM2ToolParser,
    MuseGlimmerToolParser,
)
from jaxis.parsing.tool_parsers.kimi import KimiToolParser
from jaxis.parsing.tool_parsers.kimi_k3 import KimiK3ToolParser
from jaxis.parsing.tool_parsers.lfm2 import LFM2ToolParser
from jaxis.parsing.tool_parsers.llama import LlamaToolParser
from jaxis.parsing.tool_parsers.minimax_m3 import MiniMaxM3ToolParser
from jaxis.parsing.tool_parsers.mistral import MistralToolParser
from jaxis.parsing.tool_parsers.olmo3 import MiniCPMToolParser, Olmo3ToolParser
from jaxis.parsing.tool_parsers.python_list import PythonListToolParser
from jaxis.parsing.tool_parsers.qwen3_coder import Qwen3CoderToolParser, SeedOssToolParser

# The names are those that other servers use, where they have one.
TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "apertus": ApertusToolParser,
    "cohere_command3": CohereToolParser,
    "cohere_command4": CohereToolParser,
    "cohere_command_r": CommandRToolParser,
    "deepseek_v3": DeepSeekToolParser,
    "deepseek_v31": DeepSeekToolParser,
    "deepseek_v32": DeepSeekV32ToolParser,
    "deepseek_v4": DeepSeekV4ToolParser,
    "deepseek_v41": DeepSeekV41ToolParser,
    "functiongemma": FunctionGemmaToolParser,
    "gemma3": Gemma3ToolParser,
    "gemma4": Gemma4ToolParser,
    "glm45": GLMToolParser,
    "granite": GraniteToolParser,
    "hermes": HermesToolParser,
    "hunyuan_a13b": HunyuanToolParser,
    "hy_v3": HunyuanV3ToolParser,
    "hy_v4": HunyuanV4ToolParser,
    "inkling": InklingToolParser,
    "kimi_k2": KimiToolParser,
    "kimi_k3": KimiK3ToolParser,
    "lfm2": LFM2ToolParser,
    "llama3_json": LlamaToolParser,
    "llama4_pythonic": PythonListToolParser,
    "longcat": LongcatToolParser,
    "minicpm": MiniCPMToolParser,
    "minimax_m2": MiniMaxM2ToolParser,
    "minimax_m3": MiniMaxM3ToolParser,
    "mistral": MistralToolParser,
    "muse_glimmer": MuseGlimmerToolParser,
    "nemotron_nano_v2": NemotronNanoV2ToolParser,
    "olmo3": Olmo3ToolParser,
    "openai": HarmonyToolParser,
    "phi4_mini_json": CallListToolParser,
    "pythonic": PythonListToolParser,
    "qwen3_coder": Qwen3CoderToolParser,
    "seed_oss": SeedOssToolParser,
}


def get_tool_parser(name: str) -> type[ToolParser]:
    """Returns the parser class of this name. Raises ConfigError if there is no such parser."""
    if name not in TOOL_PARSERS:
        raise ConfigError(f"tool_call_parser={name!r} is unknown; choose one of {', '.join(TOOL_PARSERS)}")
    return TOOL_PARSERS[name]
