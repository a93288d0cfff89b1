from __future__ import annotations

from typing import Any

from jaxis.server.generation.prompts import template_sources, thinking_variables
from jaxis.server.generation.served_model import ServedModel
from jaxis.tokenizer.chat_messages import reasoning_effort_variables


def effort_variables(effort: str | None, model: ServedModel) -> dict[str, Any] | None:
    """Returns the variables of the chat template for a request's reasoning effort, if it names one.

    An effort that is a budget switches thinking on or off. None if neither the template nor the server's budgets know
    the effort.
    """
    if effort is None:
        return {}
    if (variables := reasoning_effort_variables(effort, template_sources(model.tokenizer))) is not None:
        return variables
    budget = effort_budget(effort, model)
    return None if budget is None else thinking_variables(budget > 0, model.tokenizer)


def effort_budget(effort: str | None, model: ServedModel) -> int | None:
    """Returns the budget of thinking tokens for a request's reasoning effort, if it names one.

    None if the effort sets no budget: the chat template reads it, the model's marks of thinking are not known, or the
    server has no budget for it.
    """
    if effort is None or model.parsers.reasoning is None:
        return None
    if reasoning_effort_variables(effort, template_sources(model.tokenizer)) is not None:
        return None
    return model.effort_budgets.get(effort)
