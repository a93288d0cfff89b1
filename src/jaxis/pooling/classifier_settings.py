"""What a classifier's numbers mean, as its config.json says. Imports no JAX."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jaxis.config.hf_config import HFConfig
from jaxis.errors import ConfigError, RequestError

Activation = Literal["identity", "sigmoid", "softmax"]
_OF_PROBLEM: dict[str, Activation] = {"regression": "identity", "multi_label_classification": "sigmoid"}
# Of sentence-transformers' cross-encoders: the end of the name of a module of PyTorch's.
_OF_MODULE: dict[str, Activation] = {"Identity": "identity", "Sigmoid": "sigmoid"}
_CLASSIFIER_ENDS = ("ForSequenceClassification", "ForRewardModel")
# Decoders whose names differ from their classifiers' in more than the end.
_DECODERS = {
    "GPT2": "GPT2LMHeadModel",
    "Gemma3": "Gemma3ForConditionalGeneration",
    "Gemma3Text": "Gemma3ForCausalLM",
}


@dataclass(frozen=True)
class ClassifierSettings:
    """What follows a classifier's logits.

    Attributes:
      labels: The name of each.
      activation: What makes scores of logits.
    """

    labels: tuple[str, ...]
    activation: Activation

    @property
    def tasks(self) -> tuple[str, ...]:
        """What it does, in the words of most APIs."""
        return ("rerank", "classification") if len(self.labels) == 1 else ("classification",)

    def check_scores(self) -> None:
        """Raises RequestError if it does not score pairs."""
        if len(self.labels) != 1:
            raise RequestError(
                f"this model has {len(self.labels)} labels, so it has no score of a pair: classify with it, or use a "
                "reranker, which has one"
            )

    def scores(self, logits: np.ndarray, *, use_activation: bool = True) -> np.ndarray:
        """float32 logits [R, labels] -> float32 scores; a row's do not depend on the others."""
        if not use_activation or self.activation == "identity":
            return logits
        # By Python's exponential: NumPy's last bits depend on where in an array an element is.
        rows = logits.astype(np.float64).tolist()
        activate = _softmax if self.activation == "softmax" else _sigmoids
        return np.array([activate(row) for row in rows], np.float32).reshape(logits.shape)


def is_classifier(architectures: Sequence[str]) -> bool:
    """Whether one of the names is a classifier's."""
    return any(name.endswith(_CLASSIFIER_ENDS) for name in architectures)


def decoders_of_classifiers(architectures: Sequence[str]) -> list[str] | None:
    """What `architectures` calls the decoders of such classifiers where they generate text; None: there is none."""
    names = [name.removesuffix(end) for name in architectures for end in _CLASSIFIER_ENDS if name.endswith(end)]
    found = [_DECODERS.get(name, f"{name}ForCausalLM") for name in names]
    return found or None


def num_labels(config: HFConfig) -> int:
    """How many logits a classifier has; two, if its config.json does not say."""
    return len(_labels(config))


def read_classifier_settings(config: HFConfig, architectures: Sequence[str]) -> ClassifierSettings:
    """The settings of a classifier.

    Args:
      config: Its config.json.
      architectures: The names in it.

    Raises:
      ConfigError: It asks for an activation that is not supported.
    """
    labels = _labels(config)
    return ClassifierSettings(labels, _activation(config, architectures, len(labels)))


def _labels(config: HFConfig) -> tuple[str, ...]:
    names = config.read_object("id2label") or {}
    try:
        by_id = {int(number): str(name) for number, name in names.items()}
    except ValueError:
        by_id = {}
    number = config.get("num_labels", len(names) or 2)
    if not isinstance(number, int) or number < 1 or (names and sorted(by_id) != list(range(number))):
        raise ConfigError(
            f"{config.source} has num_labels={number!r} and id2label={names!r}, which name no labels from 0: correct it"
        )
    return tuple(by_id.get(index, f"LABEL_{index}") for index in range(number))


def _activation(config: HFConfig, architectures: Sequence[str], count: int) -> Activation:
    named = config.get("sbert_ce_default_activation_function")
    named = (config.read_object("sentence_transformers") or {}).get("activation_fn", named)
    if named is not None:
        kind = str(named).rpartition(".")[2]
        if kind not in _OF_MODULE:
            raise ConfigError(
                f"{config.source} asks for the activation {named!r} of scores; Identity and Sigmoid are supported"
            )
        return _OF_MODULE[kind]
    problem = config.get("problem_type")
    if problem in _OF_PROBLEM:
        return _OF_PROBLEM[problem]
    if any(name.endswith("ForRewardModel") for name in architectures):
        return "identity"
    return "sigmoid" if count == 1 else "softmax"


def _sigmoids(row: Sequence[float]) -> list[float]:
    return [1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x)) for x in row]


def _softmax(row: Sequence[float]) -> list[float]:
    powers = [math.exp(x - max(row)) for x in row]
    return [power / math.fsum(powers) for power in powers]
