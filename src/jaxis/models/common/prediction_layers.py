"""Multi-token-prediction layers (arXiv:2412.19437), which some checkpoints have after the model's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np


def without_layers(
    weights: Iterable[tuple[str, np.ndarray]], decoder_name: str, indices: Iterable[int]
) -> Iterator[tuple[str, np.ndarray]]:
    """Drops the tensors of prediction layers, which are numbered from the model's own layers on.

    A prediction layer drafts tokens for speculative decoding; the model's own logits do not depend on it.

    Args:
      weights: (name, tensor) pairs.
      decoder_name: The dotted name of the decoder that has the layers.
      indices: The layers to drop.
    """
    prefixes = tuple(f"{decoder_name}.layers.{i}." for i in indices)
    return ((name, tensor) for name, tensor in weights if not name.startswith(prefixes))
