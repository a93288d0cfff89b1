"""Pairs of texts to score, and the similarity of two vectors. Imports no JAX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxis.errors import RequestError

Texts = str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]]


def as_texts(value: Texts, name: str) -> list[str]:
    """Returns the strings of one side of pairs.

    Args:
      value: A string or an object with a `text`, or a list of them.
      name: Name of the value in errors.

    Raises:
      RequestError: The value is something else.
    """
    items = [value] if isinstance(value, str | Mapping) else list(value)
    texts = [item.get("text") if isinstance(item, Mapping) else item for item in items]
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise RequestError(f"[{index}] must be a string, or an object with a `text`", param=name)
    if not texts:
        raise RequestError("is empty: give at least one string", param=name)
    return [text for text in texts if isinstance(text, str)]


def pair_indices(num_first: int, num_second: int) -> list[tuple[int, int]]:
    """Returns the index pairs of the two sides. A side of one string is paired with each string of the other."""
    return [(0 if num_first == 1 else index, index) for index in range(num_second)]


def similarities(first: np.ndarray, second: np.ndarray) -> list[float]:
    """Returns the cosine of each pair of vectors, [pairs, E], in float64. A pair's value depends on that pair only."""
    first, second = first.astype(np.float64), second.astype(np.float64)
    norms = np.sqrt((first * first).sum(1)) * np.sqrt((second * second).sum(1))
    return ((first * second).sum(1) / np.maximum(norms, 1e-24)).tolist()
