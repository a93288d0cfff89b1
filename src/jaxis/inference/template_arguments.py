"""Conversion of a run's parameters to the arguments of the chat template."""

from __future__ import annotations

from typing import Any

from jaxis.engine.model_params import ModelParams
from jaxis.errors import ConfigError
from jaxis.inference.generation_params import GenerationParams
from jaxis.tokenizer import Tokenizer
from jaxis.tokenizer.chat_messages import reasoning_effort_variables, reserved_variable
from jaxis.tokenizer.template_choice import chat_template_source


def template_arguments(model: ModelParams, generation: GenerationParams, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Returns keyword arguments for rendering every conversation.

    Raises ConfigError if the template does not exist, or does not read one of the arguments.
    """
    arguments: dict[str, Any] = dict(model.chat_template_kwargs or {})
    if (reserved := reserved_variable(arguments, tokenizer)) is not None:
        raise ConfigError(f"model.chat_template_kwargs must not set {reserved!r}: leave it out")
    templates = {} if tokenizer is None else tokenizer.chat_templates
    if (asked := model.chat_template) is not None:
        arguments["chat_template"] = asked if asked in templates else chat_template_source(asked, templates)
    if generation.reasoning_effort is not None:
        source: str = arguments.get("chat_template", "".join(templates.values()))
        variables = reasoning_effort_variables(generation.reasoning_effort, templates.get(source, source))
        if variables is None:
            raise ConfigError(
                f"generation.reasoning_effort={generation.reasoning_effort!r} cannot be honoured: the model's chat "
                "template does not read it"
            )
        arguments |= variables
    return arguments
