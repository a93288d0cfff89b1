"""Settings of classifiers and rerankers, from config.json. Imports no JAX."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from jaxis.config.hf_config import HFConfig
from jaxis.errors import ConfigError, RequestError
from jaxis.pooling.pair_template import (
    QWEN3_RERANKER,
    QWEN3_RERANKER_TOKENS,
    PairTemplate,
    is_qwen3_reranker,
)

Activation = Literal["identity", "sigmoid", "softmax"]
_OF_PROBLEM: dict[str, Activation] = {"regression": "identity", "multi_label_classification": "sigmoid"}
# Names of PyTorch modules at the end of the setting in sentence-transformers' cross-encoders.
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
    """The conversion of a classifier's logits to scores.

    Attributes:
      labels: Names of the labels.
      activation: Function from logits to scores.
      template: Text around a pair; None: the tokenizer combines the two texts.
      head_tokens: Tokens whose logits, from the language model's head, are those of the labels; empty: the classifier
        has a head of its own.
      is_difference: True if there are two of these tokens, and the logit is the second's minus the first's.
    """

    labels: tuple[str, ...]
    activation: Activation
    template: PairTemplate | None = None
    head_tokens: tuple[str, ...] = ()
    is_difference: bool = False

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the model's tasks, as most APIs use them."""
        return ("rerank", "classification") if len(self.labels) == 1 else ("classification",)

    def check_scores(self) -> None:
        """Raises RequestError if the model does not score pairs."""
        if len(self.labels) != 1:
            raise RequestError(
                f"this model has {len(self.labels)} labels, so it has no score of a pair: classify with it, or use a "
                "reranker, which has one"
            )

    def scores(self, logits: np.ndarray, *, use_activation: bool = True) -> np.ndarray:
        """Returns float32 scores of float32 logits [R, labels]. The scores of a row do not depend on the others."""
        if not use_activation or self.activation == "identity":
            return logits
        # Python's exponential: the last bits of NumPy's depend on the place of an element in its array.
        rows = logits.astype(np.float64).tolist()
        activate = _softmax if self.activation == "softmax" else _sigmoids
        return np.array([activate(row) for row in rows], np.float32).reshape(logits.shape)


def is_classifier(architectures: Sequence[str], path: Path) -> bool:
    """Returns whether a checkpoint, given by its architectures and path, is a classifier or a reranker."""
    return any(name.endswith(_CLASSIFIER_ENDS) for name in architectures) or _is_qwen3_reranker(architectures, path)


def _is_qwen3_reranker(architectures: Sequence[str], path: Path) -> bool:
    return any(name.startswith("Qwen3For") for name in architectures) and is_qwen3_reranker(path)


def decoders_of_classifiers(architectures: Sequence[str]) -> list[str] | None:
    """Returns the architectures of the decoders that such classifiers are based on; None if there are none."""
    names = [name.removesuffix(end) for name in architectures for end in _CLASSIFIER_ENDS if name.endswith(end)]
    found = [_DECODERS.get(name, f"{name}ForCausalLM") for name in names]
    return found or None


def num_labels(config: HFConfig) -> int:
    """Returns the number of a classifier's logits; two if config.json does not say."""
    return len(_labels(config))


def read_classifier_settings(config: HFConfig, architectures: Sequence[str], path: Path) -> ClassifierSettings:
    """Reads the settings of a classifier.

    Args:
      config: config.json of the checkpoint. vLLM's overrides for rerankers that are decoders are read:
        `classifier_from_token` (words whose logits count), `method` and `is_original_qwen3_reranker`.
      architectures: Architectures in it.
      path: Folder or file of the checkpoint.

    Raises:
      ConfigError: The config has an unsupported setting.
    """
    is_qwen3 = _is_qwen3_reranker(architectures, path)
    template = QWEN3_RERANKER if config.get("is_original_qwen3_reranker", is_qwen3) else None
    has_head = any(name.endswith(_CLASSIFIER_ENDS) for name in architectures)
    tokens = config.get("classifier_from_token", () if has_head or not is_qwen3 else QWEN3_RERANKER_TOKENS)
    if not tokens:
        labels = _labels(config)
        return ClassifierSettings(labels, _activation(config, architectures, len(labels)), template)
    if not isinstance(tokens, list | tuple) or not all(isinstance(token, str) for token in tokens):
        raise ConfigError(f"classifier_from_token={tokens!r} must be a list of words: correct it")
    is_two_way = len(tokens) == 2 and template is not None
    method = config.get("method", "from_2_way_softmax" if is_two_way else "no_post_processing")
    is_difference = method == "from_2_way_softmax"
    if method not in ("from_2_way_softmax", "no_post_processing") or (is_difference and len(tokens) != 2):
        raise ConfigError(
            f"method={method!r} with classifier_from_token={list(tokens)!r} is not supported: from_2_way_softmax takes "
            "two words, no_post_processing any number"
        )
    labels = tuple(tokens[-1:] if is_difference else tokens)
    activation = _activation(config, architectures, len(labels))
    return ClassifierSettings(labels, activation, template, tuple(tokens), is_difference)


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
