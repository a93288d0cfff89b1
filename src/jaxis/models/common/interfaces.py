"""The interfaces between model classes, the loader and the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
from flax import nnx

from jaxis.layers.weight_loader import JaxAutoWeightsLoader


class JaxIntermediateTensors(dict):
    """Named arrays that one pipeline stage hands to the next, `hidden_states` among them."""


@runtime_checkable
class LoadsWeights(Protocol):
    """The contract with the model loader: `load_weights(weights)`, or the older guide's `load_weights(rng)`."""

    @property
    def load_weights(self) -> Callable[..., Any]:
        """Fills the parameters."""
        ...


class LoadableWithIterator:
    """Gives a model class `load_weights` by the automatic loader: names and shapes are the checkpoint's."""

    def load_weights(self, weights: Iterable[tuple[str, np.ndarray]]) -> set[str]:
        """Fills the parameters from (name, tensor) pairs; returns the names of those filled."""
        # A mix-in: the classes that inherit it are modules.
        return JaxAutoWeightsLoader(cast(nnx.Module, self)).load_weights(weights)
