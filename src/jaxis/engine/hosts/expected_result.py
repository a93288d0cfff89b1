"""Results that the last pipeline stage's host computes for the leader, as arrays that wait when they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


class ExpectedResult:
    """The result of a call, computed on another host and received later.

    Attributes:
      call: Number of the call.
      arrays: Leaves of the result; None until they are received.

    Args:
      call: Number of the call.
      wait: Function that blocks until `arrays` is set, or raises an error.
    """

    def __init__(self, call: int, wait: Callable[[ExpectedResult], None]) -> None:
        self.call, self._wait = call, wait
        self.arrays: Sequence[np.ndarray] | None = None

    def array(self, index: int) -> ExpectedArray:
        """Returns one leaf, which may not have been received yet."""
        return ExpectedArray(self, index)

    def read(self) -> Sequence[np.ndarray]:
        """Waits for the leaves.

        Raises:
          EngineError: The group is lost.
        """
        self._wait(self)
        assert self.arrays is not None
        return self.arrays


class ExpectedArray:
    """A leaf of an `ExpectedResult`. `np.asarray` waits until it is received."""

    def __init__(self, result: ExpectedResult, index: int) -> None:
        self._result, self._index = result, index

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self._result.read()[self._index], dtype, copy=copy)
