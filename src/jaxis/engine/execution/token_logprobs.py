"""The log-probabilities of chosen tokens. No JAX here: the server's process reads them too."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

Array = TypeVar("Array")


class TokenLogprobs(NamedTuple, Generic[Array]):
    """Log-probabilities of R given tokens, and of the most likely tokens; device or numpy arrays.

    Attributes:
      logprobs: float32 [R].
      ranks: int32 [R]; 1 plus the number of more likely tokens.
      top_logprobs: float32 [R, N], most likely first.
      top_ids: int32 [R, N].
    """

    logprobs: Array
    ranks: Array
    top_logprobs: Array
    top_ids: Array
