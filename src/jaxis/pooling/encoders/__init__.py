"""Encoder models, one file for each family, by their names in `architectures`."""

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
    "NewForSequenceClassification": "gte",
    "NewModel": "gte",
    "NomicBertForSequenceClassification": "nomic_bert",
    "NomicBertModel": "nomic_bert",
    "RobertaForSequenceClassification": "bert",
    "RobertaModel": "bert",
    "XLMRobertaForSequenceClassification": "bert",
    "XLMRobertaModel": "bert",
}


def is_encoder(architectures: Sequence[str]) -> bool:
    """Returns whether one of the architectures is an encoder. Imports no encoder."""
    return any(name in _CLASSES for name in architectures)


def encoder_class(architectures: Sequence[str]) -> type[Any] | None:
    """Returns the class of the first architecture that is an encoder; None if there is none."""
    for name in architectures:
        if name in _CLASSES:
            return getattr(importlib.import_module(f"jaxis.pooling.encoders.{_CLASSES[name]}"), name)
    return None


def encoder_classes() -> dict[str, type[Any]]:
    """Imports and returns all encoder classes, by their names in `architectures`."""
    return {
        name: getattr(importlib.import_module(f"jaxis.pooling.encoders.{file}"), name)
        for name, file in _CLASSES.items()
    }
