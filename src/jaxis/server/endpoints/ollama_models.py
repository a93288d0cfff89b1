"""The served model as Ollama describes models."""

from __future__ import annotations

from jaxis.server.endpoints.context import ServerContext
from jaxis.server.endpoints.model_facts import rfc3339
from jaxis.server.protocol.ollama_models import OllamaDetails, OllamaLoadedModel, OllamaModelEntry, OllamaShown

_NAMES = {"repetition_penalty": "repeat_penalty"}
_SHOWN_PARAMETERS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def model_entries(context: ServerContext) -> list[OllamaModelEntry]:
    """One for each name under which the model is served."""
    facts = context.facts
    return [
        OllamaModelEntry(
            name=name,
            model=name,
            modified_at=rfc3339(facts.modified),
            size=facts.file_bytes,
            digest=facts.digest,
            details=_details(context),
            capabilities=facts.capabilities("thinking"),
        )
        for name in context.model.names
    ]


def loaded_models(context: ServerContext) -> list[OllamaLoadedModel]:
    """The same: the model is always loaded."""
    length = context.facts.context_length
    return [OllamaLoadedModel(**dict(entry), context_length=length) for entry in model_entries(context)]


def shown_model(name: str, context: ServerContext) -> OllamaShown:
    """Everything about the model under one of its names."""
    facts, tokenizer = context.facts, context.model.tokenizer
    architecture = facts.architecture
    info = {
        "general.architecture": architecture,
        "general.basename": name,
        "general.parameter_count": facts.num_parameters,
        f"{architecture}.context_length": facts.context_length,
        f"{architecture}.vocab_size": context.engine.info.vocab_size,
    }
    defaults = context.model.default_sampling_params
    parameters = [f"{_NAMES.get(name, name)} {getattr(defaults, name)}" for name in _SHOWN_PARAMETERS]
    return OllamaShown(
        parameters="\n".join(parameters),
        template=(tokenizer.default_chat_template if tokenizer else None) or "",
        details=_details(context),
        model_info=info,
        capabilities=facts.capabilities("thinking"),
        modified_at=rfc3339(facts.modified),
    )


def _details(context: ServerContext) -> OllamaDetails:
    facts = context.facts
    return OllamaDetails(
        format=facts.file_format,
        family=facts.architecture,
        families=[facts.architecture],
        parameter_size=facts.parameter_size,
        quantization_level=facts.weight_type or "unknown",
        context_length=facts.context_length,
    )
