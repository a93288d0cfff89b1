"""Models that see an input as a whole, one file per family, by the names that checkpoints have in `architectures`."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

_CLASSES = {
    "BertForSequenceClassification": "bert",
    "BertModel": "bert",
    "Gemma3TextModel": "gemma3",
    "GteForSequenceClassification": "gte",
    "GteModel": "gte",
    "ModernBertForSequenceClassification": "modernbert",
    "ModernBertModel": "modernbert",
    "NomicBertForSequenceClassification": "nomic_bert",
    "NomicBertModel": "nomic_bert",
    "RobertaForSequenceClassification": "bert",
    "RobertaModel": "bert",
    "XLMRobertaForSequenceClassification": "bert",
    "XLMRobertaModel": "bert",
}


def is_encoder(architectures: Sequence[str]) -> bool:
    """Whether one of the names is an encoder's; imports none."""
    return any(name in _CLASSES for name in architectures)


def encoder_class(architectures: Sequence[str]) -> type[Any] | None:
    """The class of the first name that is an encoder's; None if none is."""
    for name in architectures:
        if name in _CLASSES:
            return getattr(importlib.import_module(f"jaxis.pooling.encoders.{_CLASSES[name]}"), name)
    return None


def encoder_classes() -> dict[str, type[Any]]:
    """Every encoder: the name in `architectures` -> its class; imports them all."""
    return {
        name: getattr(importlib.import_module(f"jaxis.pooling.encoders.{file}"), name)
        for name, file in _CLASSES.items()
    }
