"""Tensors without data, by which loading is checked from the headers of files alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


class HeaderTensor(np.ndarray):
    """A tensor's shape and type, as an array that takes no memory: all its elements are the same 0.

    Loaders check and take it, but do not place, cast or repack it. Views (slices, transposes, reshapes) are
    HeaderTensors too; `astype` makes one instead of copying.
    """

    @classmethod
    def of(cls, shape: tuple[int, ...], dtype: npt.DTypeLike) -> HeaderTensor:
        return np.broadcast_to(np.zeros((), dtype), shape).view(cls)

    def astype(self, dtype: npt.DTypeLike, *_: Any, **__: Any) -> HeaderTensor:
        return HeaderTensor.of(self.shape, dtype)
