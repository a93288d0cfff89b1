from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxis.errors import CheckpointError
from jaxis.host.dotted_names import by_dotted_name
from jaxis.loading.safetensors import TensorInfo

GivenWeights = Mapping[str, Any] | Iterable[tuple[str, Any]]
"""Arrays by a checkpoint's names of tensors: a mapping, whose values may be mappings of what follows the next dot, or
pairs. Arrays are NumPy's, JAX's, or what has `__dlpack__`, as PyTorch's have."""


@runtime_checkable
class IteratedTensors(Protocol):
    """Tensors by their names, such as those of an open checkpoint."""

    def iterate(self) -> Iterator[tuple[str, np.ndarray]]: ...


_FLOATS = (np.floating, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)


class BorrowedArray(np.ndarray):
    """An array, or a view of one, that the caller may write to after it was read. It is copied to be kept."""


class GivenTensors:
    """Tensors that a program has in memory, with the interface of `Checkpoint`. A context manager.

    Attributes:
      stored: Types and shapes in the model's own checkpoint.
    """

    total_bytes = 0  # not known before they were read

    def __init__(self, weights: GivenWeights | IteratedTensors, stored: Mapping[str, TensorInfo]) -> None:
        self._weights, self.stored = weights, stored

    def iterate(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields every tensor once.

        Raises CheckpointError if a value is not an array, or has integers where the model has floats.
        """
        weights = self._weights
        for name, value in weights.iterate() if isinstance(weights, IteratedTensors) else by_dotted_name(weights):
            array = _host_array(name, value)
            if name not in self.stored:
                yield name, array
                continue
            dtype = self.stored[name].dtype
            if _is_float(dtype) != _is_float(array.dtype):
                raise CheckpointError(f"tensor {name!r} is {array.dtype}, and {dtype} in the model")
            yield name, array.astype(dtype, copy=False) if _is_float(dtype) else array

    def __enter__(self) -> GivenTensors:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _host_array(name: str, value: Any) -> np.ndarray:
    """Returns the value as an array in the host's memory; borrowed, if others can write to it."""
    try:
        if isinstance(value, jax.Array) or (isinstance(value, np.ndarray) and not value.flags.writeable):
            return np.asarray(value)
        return np.asarray(value if isinstance(value, np.ndarray) else jnp.from_dlpack(value)).view(BorrowedArray)
    except (AttributeError, TypeError, ValueError, RuntimeError, BufferError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"tensor {name!r} is no array of NumPy, JAX or DLPack: {reason}") from None


def _is_float(dtype: np.dtype) -> bool:
    return any(np.issubdtype(dtype, kind) for kind in _FLOATS)
