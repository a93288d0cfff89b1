"""The log-probabilities of chosen tokens. No JAX here: the server's process reads them too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np

Array = TypeVar("Array")
Other = TypeVar("Other")


class TokenLogprobs(NamedTuple, Generic[Array]):
    """Log-probabilities of R given tokens, and of the most likely tokens; device or numpy arrays.

    Attributes:
      logprobs: float32 [R].
      ranks: int32 [R]; 1 plus the number of more likely tokens.
      top_logprobs: float32 [R, N], most likely first.
      top_ids: int32 [R, N].
      kept_mass: float32 [R]; the probability, after temperature, of the tokens that top-k, top-p and min-p keep. None
        if all rows are of the model's own logits.
    """

    logprobs: Array
    ranks: Array
    top_logprobs: Array
    top_ids: Array
    kept_mass: Array | None = None

    def each(self, function: Callable[[Array], Other]) -> TokenLogprobs[Other]:
        """Applies a function to each array."""
        mass = None if self.kept_mass is None else function(self.kept_mass)
        return TokenLogprobs(
            function(self.logprobs), function(self.ranks), function(self.top_logprobs), function(self.top_ids), mass
        )


def joined_logprobs(parts: Sequence[TokenLogprobs[np.ndarray]], number: int) -> TokenLogprobs[np.ndarray]:
    """Returns the first `number` of the parts' rows, one part after the other."""

    def joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate(arrays)[:number]

    masses = [part.kept_mass for part in parts if part.kept_mass is not None]
    return TokenLogprobs(
        joined([part.logprobs for part in parts]),
        joined([part.ranks for part in parts]),
        joined([part.top_logprobs for part in parts]),
        joined([part.top_ids for part in parts]),
        joined(masses) if masses else None,
    )
