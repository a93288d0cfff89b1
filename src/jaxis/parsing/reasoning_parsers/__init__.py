"""Reasoning parsers, which separate reasoning from the answer; one file per format."""

from __future__ import annotations

from jaxis.errors import ConfigError
from jaxis.parsing.reasoning_parsers.base import ReasoningParser
from jaxis.parsing.reasoning_parsers.granite import GraniteReasoningParser
from jaxis.parsing.reasoning_parsers.harmony import HarmonyReasoningParser
from jaxis.parsing.reasoning_parsers.think import (
    CohereReasoningParser,
    Gemma4ReasoningParser,
    MistralReasoningParser,
    ThinkReasoningParser,
)

# The names are those that other servers use.
REASONING_PARSERS: dict[str, type[ReasoningParser]] = {
    "cohere_command3": CohereReasoningParser,
    "cohere_command4": CohereReasoningParser,
    "deepseek_r1": ThinkReasoningParser,
    "gemma4": Gemma4ReasoningParser,
    "glm45": ThinkReasoningParser,
    "granite": GraniteReasoningParser,
    "kimi_k2": ThinkReasoningParser,
    "mistral": MistralReasoningParser,
    "openai_gptoss": HarmonyReasoningParser,
    "qwen3": ThinkReasoningParser,
}


def get_reasoning_parser(name: str) -> type[ReasoningParser]:
    """Returns the parser class of this name.

    Raises:
      ConfigError: There is no such parser.
    """
    if name not in REASONING_PARSERS:
        raise ConfigError(f"reasoning_parser={name!r} is unknown; choose one of {', '.join(REASONING_PARSERS)}")
    return REASONING_PARSERS[name]
