"""Batch inference over conversations, under the names of Oumi's inference engines.

`JAXInferenceEngine` answers conversations from memory or from a JSONL file. Rows fail one by one, results are kept as
they finish, and an interrupted run resumes where it stopped.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxis.engine.model_params import ModelParams
    from jaxis.inference.engine import JAXInferenceEngine
    from jaxis.inference.generation_params import GenerationParams, GuidedDecodingParams
    from jaxis.inference.inference_config import InferenceConfig
    from jaxis.jsonl.conversation import ContentItem, Conversation, Message, Role, Type

_EXPORTS = {
    **dict.fromkeys(("ContentItem", "Conversation", "Message", "Role", "Type"), "jaxis.jsonl.conversation"),
    **dict.fromkeys(("GenerationParams", "GuidedDecodingParams"), "jaxis.inference.generation_params"),
    "InferenceConfig": "jaxis.inference.inference_config",
    "JAXInferenceEngine": "jaxis.inference.engine",
    "ModelParams": "jaxis.engine.model_params",
}

__all__ = [
    "ContentItem",
    "Conversation",
    "GenerationParams",
    "GuidedDecodingParams",
    "InferenceConfig",
    "JAXInferenceEngine",
    "Message",
    "ModelParams",
    "Role",
    "Type",
]


def __getattr__(name: str) -> Any:
    """Imports names on first use, so that a configuration can be refused without waiting for JAX."""
    if name not in _EXPORTS:
        raise AttributeError(f"module 'jaxis.inference' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)
