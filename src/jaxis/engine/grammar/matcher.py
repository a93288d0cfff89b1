"""Interfaces between the engine and the constraints on a completion's tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np


class Matcher(Protocol):
    """Position of one completion in its constraint.

    Attributes:
      may_favor: True if it favors tokens at some positions (see `favored_token`).
    """

    @property
    def may_favor(self) -> bool:
        return False

    @property
    def param(self) -> str:
        """The request's parameter at fault if no token can come next."""
        ...

    @property
    def error(self) -> str | None:
        """Reason why it cannot be followed any further; None while it can."""
        ...

    @property
    def is_complete(self) -> bool:
        """True if the completion has ended, or only a token that ends it can follow, as `token_mask` then says."""
        ...

    def fork(self) -> Matcher:
        """Returns another matcher at the same position."""
        ...

    def follow(self, output_token_ids: Sequence[int]) -> None:
        """Takes in the tokens generated since the last call."""

    def token_mask(self) -> np.ndarray:
        """Returns the tokens that may come next: int32 [ceil(V / 32)], bit i % 32 of word i / 32 for token i."""
        ...

    def favored_token(self) -> int | None:
        """Returns the token that is taken if it is among the likely ones; None if none is favored."""
        return None


class Grammar(Protocol):
    """Constraint on the completions of a request."""

    def new_matcher(self, stop_token_ids: Collection[int] = ()) -> Matcher:
        """Returns a matcher that follows one completion from its start.

        Args:
          stop_token_ids: The request's stop tokens.
        """
        ...
