"""Which formats a model writes its calls and its reasoning in, by its chat template."""

from __future__ import annotations


def detect_parsers(chat_template: str | None, model_type: str | None = None) -> tuple[str | None, str | None]:
    """Names of the tool parser and of the reasoning parser that a model needs.

    Args:
      chat_template: Its Jinja source; None knows neither tools nor reasoning.
      model_type: Its configuration's.

    Returns:
      For `get_tool_parser` and `get_reasoning_parser`; None where the template has no such format, or one that is
      not known here.
    """
    template = chat_template or ""
    tool = "hermes" if "<tool_call>" in template else None
    reasoning = "qwen3" if "</think>" in template else None
    return tool, reasoning
