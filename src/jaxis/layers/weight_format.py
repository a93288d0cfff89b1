"""How checkpoints store weights: which tensors a weight [out, in] is made of, and what it is made of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jaxis.errors import CheckpointError
from jaxis.kernels.weights import Weight


class InvalidWeightError(CheckpointError):
    """Tensors that do not form a weight together; the message follows the module's name."""


@dataclass(frozen=True)
class TensorSpec:
    """The expected shape and type of a checkpoint's tensor.

    Attributes:
      shape: Its shape.
      dtypes: The types it may have, the usual one first; none: any.
      other_shapes: What some publishers write in place of `shape`.
      content: Its elements, where they are known.
    """

    shape: tuple[int, ...]
    dtypes: tuple[np.dtype, ...] = ()
    other_shapes: tuple[tuple[int, ...], ...] = ()
    content: tuple[int, ...] | None = None

    def example(self) -> np.ndarray:
        """A tensor that is as it must be, of zeros where its content is not known."""
        dtype = self.dtypes[0] if self.dtypes else np.dtype(np.float32)
        return np.zeros(self.shape, dtype) if self.content is None else np.asarray(self.content, dtype)


class WeightFormat(Protocol):
    """How a checkpoint stores a weight [out, in], of a linear layer, a table of embeddings or one expert alike."""

    def tensors(self, shape: tuple[int, ...]) -> Mapping[str, TensorSpec]:
        """What the names of the tensors of a weight [out, in] end with in the file -> what they must be."""
        ...

    def assemble(self, tensors: Mapping[str, np.ndarray], shape: tuple[int, ...], /) -> Weight:
        """A weight [out, in] of host arrays, made of its tensors, which are as `tensors` says.

        Raises:
          ValueError: They are no weight; the text goes after "a weight".
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
      name: The attribute's.
      shape: (out, in).
      axes: The logical axes of the parameter's dimensions.
      num_experts: X, of a stack [X, out, in]; None for one weight.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    num_experts: int | None = None
