"""How checkpoints store weights: which tensors make up a weight [out, in], and how it is assembled from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jaxis.errors import CheckpointError
from jaxis.kernels.weights import Weight


class InvalidWeightError(CheckpointError):
    """Tensors do not form a valid weight; the message follows the module's name."""


@dataclass(frozen=True)
class TensorSpec:
    """The expected shape and type of a checkpoint's tensor.

    Attributes:
      shape: Its shape.
      dtypes: The types it may have, the usual one first; empty means any.
      other_shapes: Other shapes that some publishers use.
      content: Its elements, if they are fixed.
    """

    shape: tuple[int, ...]
    dtypes: tuple[np.dtype, ...] = ()
    other_shapes: tuple[tuple[int, ...], ...] = ()
    content: tuple[int, ...] | None = None

    def example(self) -> np.ndarray:
        """A valid tensor, zeros unless its content is fixed."""
        dtype = self.dtypes[0] if self.dtypes else np.dtype(np.float32)
        return np.zeros(self.shape, dtype) if self.content is None else np.asarray(self.content, dtype)


class WeightFormat(Protocol):
    """How a checkpoint stores a weight [out, in] of a linear layer, an embedding table or one expert."""

    def tensors(self, shape: tuple[int, ...]) -> Mapping[str, TensorSpec]:
        """Name suffix in the file -> spec, for each tensor of a weight [out, in]."""
        ...

    def assemble(self, tensors: Mapping[str, np.ndarray], shape: tuple[int, ...], /) -> Weight:
        """Builds a weight [out, in] of host arrays from its tensors, which match the specs of `tensors`.

        Raises:
          ValueError: They do not form a valid weight; the message follows "a weight".
        """
        ...


@dataclass(frozen=True)
class PlainFormat:
    """One tensor, the weight itself."""

    def tensors(self, shape: tuple[int, ...]) -> Mapping[str, TensorSpec]:
        return {"weight": TensorSpec(shape)}

    def assemble(self, tensors: Mapping[str, np.ndarray], _shape: tuple[int, ...]) -> Weight:
        return tensors["weight"]


PLAIN = PlainFormat()


@dataclass(frozen=True)
class WeightSlot:
    """A parameter of a layer that holds a weight, or a stack of experts' weights.

    Attributes:
      name: The attribute's name.
      shape: (out, in).
      axes: The logical axes of the parameter's dimensions.
      num_experts: X if the parameter is a stack [X, out, in]; None for a single weight.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    num_experts: int | None = None
