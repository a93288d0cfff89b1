"""Reasoning parsers, which separate reasoning from the answer; one file per kind of format."""

from __future__ import annotations

from jaxis.errors import ConfigError
from jaxis.parsing.reasoning_parsers.answer_tags import ErnieReasoningParser, HunyuanReasoningParser
from jaxis.parsing.reasoning_parsers.base import ReasoningParser
from jaxis.parsing.reasoning_parsers.granite import GraniteReasoningParser
from jaxis.parsing.reasoning_parsers.harmony import HarmonyReasoningParser
from jaxis.parsing.reasoning_parsers.inkling import InklingReasoningParser
from jaxis.parsing.reasoning_parsers.muse_glimmer import MuseGlimmerReasoningParser
from jaxis.parsing.reasoning_parsers.tags import (
    ApertusReasoningParser,
    CohereReasoningParser,
    Gemma4ReasoningParser,
    GLMReasoningParser,
    HunyuanV3ReasoningParser,
    KimiK3ReasoningParser,
    KimiReasoningParser,
    MiniCPMReasoningParser,
    MiniMaxM3ReasoningParser,
    MistralReasoningParser,
    SeedOssReasoningParser,
    ThinkReasoningParser,
)

# The names are those that other servers use.
REASONING_PARSERS: dict[str, type[ReasoningParser]] = {
    "apertus": ApertusReasoningParser,
    "cohere_command3": CohereReasoningParser,
    "cohere_command4": CohereReasoningParser,
    "deepseek_r1": ThinkReasoningParser,
    "ernie45": ErnieReasoningParser,
    "gemma4": Gemma4ReasoningParser,
    "glm45": GLMReasoningParser,
    "granite": GraniteReasoningParser,
    "hunyuan_a13b": HunyuanReasoningParser,
    "hy_v3": HunyuanV3ReasoningParser,
    "hy_v4": HunyuanV3ReasoningParser,
    "inkling": InklingReasoningParser,
    "kimi_k2": KimiReasoningParser,
    "kimi_k3": KimiK3ReasoningParser,
    "minicpm": MiniCPMReasoningParser,
    "minimax_m2": ThinkReasoningParser,
    "minimax_m3": MiniMaxM3ReasoningParser,
    "mistral": MistralReasoningParser,
    "muse_glimmer": MuseGlimmerReasoningParser,
    "openai_gptoss": HarmonyReasoningParser,
    "qwen3": ThinkReasoningParser,
    "seed_oss": SeedOssReasoningParser,
}


def get_reasoning_parser(name: str) -> type[ReasoningParser]:
    """Returns the parser class of this name. Raises ConfigError if there is no such parser."""
    if name not in REASONING_PARSERS:
        raise ConfigError(f"reasoning_parser={name!r} is unknown; choose one of {', '.join(REASONING_PARSERS)}")
    return REASONING_PARSERS[name]
