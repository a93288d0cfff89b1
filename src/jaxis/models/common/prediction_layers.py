"""Multi-token-prediction layers (arXiv:2412.19437), which some checkpoints hold after the model's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np


def without_prediction_layers(
    weights: Iterable[tuple[str, np.ndarray]], num_layers: int, num_prediction_layers: int
) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of the model itself.

    A prediction layer drafts tokens for speculative decoding; the model's own logits do not depend on it.

    Args:
      weights: (name, tensor) pairs.
      num_layers: Layers of the model; those of the checkpoint are counted on from there.
      num_prediction_layers: How many come after them, as config.json says (`num_nextn_predict_layers`).
    """
    prefixes = tuple(f"model.layers.{num_layers + i}." for i in range(num_prediction_layers))
    return ((name, tensor) for name, tensor in weights if not name.startswith(prefixes))
