"""Specifications of a layer's recurrent state: a fixed number of bytes for each sequence, regardless of its length."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jax.typing import DTypeLike

from jaxis.layers.module import ByMember


@dataclass(frozen=True)
class StateArray:
    """One array of a layer's state, [num_slots, *shape].

    Attributes:
      axes: Logical name of each axis of `shape`; None for an axis that is not split over devices.
      dtype: Type of the array; None for the type of the activations.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    dtype: DTypeLike | None = None

    def dtype_in(self, activations: DTypeLike) -> np.dtype:
        return np.dtype(activations if self.dtype is None else self.dtype)


@dataclass(frozen=True)
class StateCacheSpec:
    """Arrays of a layer's state. The layer gets and returns them as a tuple in this order."""

    arrays: tuple[StateArray, ...]

    def __iter__(self) -> Iterator[StateArray]:
        return iter(self.arrays)

    def slot_bytes(self, activations: DTypeLike) -> int:
        """Returns the bytes of one sequence's state, with activations of this type."""
        return sum(math.prod(array.shape) * array.dtype_in(activations).itemsize for array in self)


class HasState(metaclass=ByMember):
    """A layer that keeps a state for each sequence."""

    state_cache_spec: StateCacheSpec
