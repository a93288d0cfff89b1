"""Multi-token-prediction layers (arXiv:2412.19437), which some checkpoints have after the model's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np


def without_prediction_layers(
    weights: Iterable[tuple[str, np.ndarray]], num_layers: int, num_prediction_layers: int
) -> Iterator[tuple[str, np.ndarray]]:
    """Drops the tensors of prediction layers.

    A prediction layer drafts tokens for speculative decoding; the model's own logits do not depend on it.

    Args:
      weights: (name, tensor) pairs.
      num_layers: Number of the model's own layers; prediction layers are numbered from there on.
      num_prediction_layers: Number of prediction layers, config.json's `num_nextn_predict_layers`.
    """
    prefixes = tuple(f"model.layers.{num_layers + i}." for i in range(num_prediction_layers))
    return ((name, tensor) for name, tensor in weights if not name.startswith(prefixes))
