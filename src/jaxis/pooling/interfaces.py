"""What models may have that make more of texts than hidden states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import jax


@runtime_checkable
class HasScore(Protocol):
    """A classifier: what follows its pooled hidden states."""

    @property
    def score(self) -> Callable[[jax.Array], jax.Array]:
        """float32 [R, E] -> logits [R, labels]."""
        ...


@runtime_checkable
class HasSentenceLayers(Protocol):
    """A model whose pooled hidden states go through more layers before they are vectors."""

    @property
    def sentence_layers(self) -> Callable[[jax.Array], jax.Array]:
        """float32 [R, E] -> [R, size of a vector]."""
        ...


@runtime_checkable
class TakesTokenTypes(Protocol):
    """A model that tells the first text of a pair from the second; its `__call__` takes `token_types` i32 [T]."""

    @property
    def num_token_types(self) -> int:
        """1, if all tokens are alike."""
        ...
