"""The interfaces between model classes, the loader and the engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, cast, runtime_checkable

import numpy as np
from flax import nnx

from jaxis.layers.weight_loader import JaxAutoWeightsLoader


class JaxIntermediateTensors(dict):
    """Named arrays that one pipeline stage hands to the next, `hidden_states` among them."""


@runtime_checkable
class DropsRedundantTensors(Protocol):
    """A model whose checkpoints may hold the same tensor twice."""

    def without_redundant_tensors(self, weights: Iterable[tuple[str, np.ndarray]]) -> Iterable[tuple[str, np.ndarray]]:
        """Passes over tensors that repeat others, once they are checked."""
        ...


class LoadableWithIterator:
    """Gives a model class `load_weights` by the automatic loader: names and shapes are the checkpoint's."""

    def load_weights(self, weights: Iterable[tuple[str, np.ndarray]]) -> set[str]:
        """Fills the parameters from (name, tensor) pairs; returns the names of those filled."""
        # A mix-in: the classes that inherit it are modules.
        return JaxAutoWeightsLoader(cast(nnx.Module, self)).load_weights(weights)
