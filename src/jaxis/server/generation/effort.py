"""A request's reasoning effort: a variable of the chat template, or else a budget for the model's thinking."""

from __future__ import annotations

from typing import Any

from jaxis.server.generation.prompts import template_sources, thinking_variables
from jaxis.server.generation.served_model import ServedModel
from jaxis.tokenizer.chat_messages import reasoning_effort_variables


def effort_variables(effort: str | None, model: ServedModel) -> dict[str, Any] | None:
    """Variables of the chat template for an effort; those of one that is a budget switch the thinking on or off.

    Args:
      effort: As a request names it; None asks for nothing.
      model: The served model.

    Returns:
      None if the model has no use for the effort.
    """
    if effort is None:
        return {}
    if (variables := reasoning_effort_variables(effort, template_sources(model.tokenizer))) is not None:
        return variables
    budget = effort_budget(effort, model)
    return None if budget is None else thinking_variables(budget > 0, model.tokenizer)


def effort_budget(effort: str | None, model: ServedModel) -> int | None:
    """How many tokens the model may think at this effort.

    Args:
      effort: As a request names it; None asks for nothing.
      model: The served model.

    Returns:
      None if the effort sets no budget: the chat template reads it, it is not known how the model marks its thinking,
      or the server has none for it.
    """
    if effort is None or model.parsers.reasoning is None:
        return None
    if reasoning_effort_variables(effort, template_sources(model.tokenizer)) is not None:
        return None
    return model.effort_budgets.get(effort)
