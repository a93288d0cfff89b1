"""The interface of what observes a model's layers while a program is traced."""

from __future__ import annotations

from typing import Any, Protocol

import jax

from jaxis.layers.decoder_layer import LayerOutput


class LayerObserver(Protocol):
    """Runner of a model's layers, which collects values of them."""

    def __call__(self, *operands: Any) -> LayerOutput: ...

    def values(self) -> jax.Array:
        """Returns what was collected, [T, ...]."""
        ...
