"""What every model class shares with the loader and the engine."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from jaxis.layers.weight_loader import JaxAutoWeightsLoader


class JaxIntermediateTensors(dict):
    """Named arrays that one pipeline stage hands to the next, `hidden_states` among them."""


class LoadableWithIterator:
    """Gives a model class `load_weights` by the automatic loader: names and shapes are the checkpoint's."""

    def load_weights(self, weights: Iterable[tuple[str, np.ndarray]]) -> set[str]:
        """Fills the parameters from (name, tensor) pairs; returns the names of those filled."""
        return JaxAutoWeightsLoader(self).load_weights(weights)
