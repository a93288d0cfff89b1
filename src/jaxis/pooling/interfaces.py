"""Optional interfaces of models whose hidden states become vectors or scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import jax


@runtime_checkable
class HasScore(Protocol):
    """A classifier: a model with a head on its pooled hidden states."""

    @property
    def score(self) -> Callable[[jax.Array], jax.Array]:
        """float32 [R, E] -> logits [R, labels]."""
        ...


@runtime_checkable
class HasSentenceLayers(Protocol):
    """A model with more layers between pooled hidden states and vectors."""

    @property
    def sentence_layers(self) -> Callable[[jax.Array], jax.Array]:
        """float32 [R, E] -> [R, size of a vector]."""
        ...


@runtime_checkable
class TakesTokenTypes(Protocol):
    """A model that distinguishes the two texts of a pair. Its `__call__` takes `token_types` i32 [T]."""

    @property
    def num_token_types(self) -> int:
        """Number of token types; 1 if the texts are not distinguished."""
        ...
