from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Self

import numpy as np
from jax.typing import DTypeLike

from jaxis.kernels.weights.weight import Allocate, Weight


@dataclass(frozen=True)
class WrappedWeight(Weight):
    """A weight [..., out, in] that is another one with something around it: rows and storage are the other's.

    Attributes:
      weight: The other weight.
    """

    weight: Weight

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def storage(self) -> str:
        return self.weight.storage

    @property
    def is_packed(self) -> bool:
        return self.weight.is_packed

    @property
    def column_major_arrays(self) -> frozenset[str]:
        return self.weight.column_major_arrays

    def take_rows(self, rows: np.ndarray) -> Self:
        return dataclasses.replace(self, weight=self.weight.take_rows(rows))

    def with_rows(self, num_rows: int) -> Self:
        return dataclasses.replace(self, weight=self.weight.with_rows(num_rows))

    def pack(self, dtype: DTypeLike = np.float32, allocate: Allocate | None = None) -> Self | None:
        packed = self.weight.pack(dtype, allocate)
        return None if packed is None else dataclasses.replace(self, weight=packed)
