"""Parameters that hold a quantized checkpoint's tensors as they are, until they become a layer's weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from jaxis.errors import CheckpointError
from jaxis.layers.weight_loader import check_loadable, place_array

SCALE_DTYPES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


def stored_parameter(shape: tuple[int, ...], dtypes: Sequence[Any], axes: tuple[str | None, ...]) -> nnx.Param:
    """A parameter that takes a tensor of this shape and of one of these types, which it keeps."""
    known = tuple(np.dtype(dtype) for dtype in dtypes)
    return nnx.Param(jnp.zeros(shape, known[0]), logical_axes=axes, weight_loader=ExactLoader(known))


@dataclass(frozen=True)
class ExactLoader:
    """A `weight_loader` that keeps the tensor's type, which must be one of these."""

    dtypes: tuple[np.dtype, ...]

    def __call__(self, param: nnx.Param, tensor: np.ndarray, shard_id: str | int | None = None) -> None:
        check_loadable(param, tensor, shard_id)
        if tensor.dtype not in self.dtypes:
            expected = " or ".join(str(dtype) for dtype in self.dtypes)
            raise CheckpointError(f"is {tensor.dtype} in the checkpoint, but must be {expected} here")
        param.set_value(place_array(tensor, param.get_metadata()["logical_axes"]))
