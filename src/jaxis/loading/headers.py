"""Tensors without data, by which loading is checked from the headers of files alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import numpy.typing as npt

_only_headers: ContextVar[bool] = ContextVar("only_headers", default=False)


@contextmanager
def only_headers() -> Iterator[None]:
    """Context in which loaders get HeaderTensors: they check and take them, but do not place, cast or repack them."""
    token = _only_headers.set(True)
    try:
        yield
    finally:
        _only_headers.reset(token)


def reading_only_headers() -> bool:
    return _only_headers.get()


class HeaderTensor(np.ndarray):
    """A tensor's shape and type, as an array that takes no memory: all its elements are the same 0.

    Views (slices, transposes, reshapes) are HeaderTensors too; `astype` makes one instead of copying.
    """

    @classmethod
    def of(cls, shape: tuple[int, ...], dtype: npt.DTypeLike) -> HeaderTensor:
        return np.broadcast_to(np.zeros((), dtype), shape).view(cls)

    def astype(self, dtype: npt.DTypeLike, *_: Any, **__: Any) -> HeaderTensor:
        return HeaderTensor.of(self.shape, dtype)
