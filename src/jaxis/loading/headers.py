"""Names of tensors in MLX's files, whose metadata say `format: mlx`.

They are Hugging Face's, but for the experts of a mixture, which mlx-lm stacks: `mlp.switch_mlp.gate_proj.weight` has
those of all experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import numpy.typing as npt

_only_headers: ContextVar[bool] = ContextVar("only_headers", default=False)


@contextmanager
def only_headers() -> Iterator[None]:
    """Inside the block, loaders get HeaderTensors: they check and take them, but do not place, cast or repack them."""
    token = _only_headers.set(True)
    try:
        yield
    finally:
        _only_headers.reset(token)


def reading_only_headers() -> bool:
    """Whether `only_headers` is active."""
    return _only_headers.get()


class HeaderTensor(np.ndarray):
    """A tensor's shape and type, as an array that takes no memory: all its elements are the same 0.

    Views (slices, transposes, reshapes) are HeaderTensors too; `astype` makes one instead of copying.
    """

    @classmethod
    def of(cls, shape: tuple[int, ...], dtype: npt.DTypeLike) -> HeaderTensor:
        """A header with this shape and type."""
        return np.broadcast_to(np.zeros((), dtype), shape).view(cls)

    def astype(self, dtype: npt.DTypeLike, *_: Any, **__: Any) -> HeaderTensor:
        """The header of the cast tensor."""
        return HeaderTensor.of(self.shape, dtype)


# Names of tensors in MLX's files, whose metadata say `format: mlx`.
#
# They are Hugging Face's, but for the experts of a mixture, which mlx-lm stacks: `mlp.switch_mlp.gate_proj.weight`
# has those of all experts.


def is_mlx(metadata: Mapping[str, str]) -> bool:
    """Whether a file with this metadata is MLX's."""
    return metadata.get("format") == "mlx"


def hugging_face_name(name: str) -> str:
    """The tensor's name without what is MLX's own."""
    return name.replace(".switch_mlp.", ".experts.")
