"""What the last pipeline stage's host computes for the leader, as arrays that it waits for when it reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


class ExpectedResult:
    """What a call will have computed on another host.

    Attributes:
      call: The call's number.
      arrays: The leaves of its result; None before they have come.

    Args:
      call: The call's number.
      wait: Called with this, returns once `arrays` are there, or raises an error.
    """

    def __init__(self, call: int, wait: Callable[[ExpectedResult], None]) -> None:
        self.call, self._wait = call, wait
        self.arrays: Sequence[np.ndarray] | None = None

    def array(self, index: int) -> ExpectedArray:
        """One of the leaves."""
        return ExpectedArray(self, index)

    def read(self) -> Sequence[np.ndarray]:
        """The leaves, once they are there.

        Raises:
          EngineError: The group is lost.
        """
        self._wait(self)
        assert self.arrays is not None
        return self.arrays


class ExpectedArray:
    """A leaf of an `ExpectedResult`, for `np.asarray`, which waits for it."""

    def __init__(self, result: ExpectedResult, index: int) -> None:
        self._result, self._index = result, index

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self._result.read()[self._index], dtype, copy=copy)
