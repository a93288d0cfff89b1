"""Storage of weights in checkpoints: the tensors that make up a weight [out, in], and its assembly from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jaxis.errors import CheckpointError
from jaxis.kernels.weights import WeightValue


class InvalidWeightError(CheckpointError):
    """Tensors do not form a valid weight; the message follows the module's name."""


# Scales that no packing stores as codes, as scales of checkpoints are not.
_IRREGULAR = tuple(1 + 37 * i % 113 / 113 for i in range(113))


@dataclass(frozen=True)
class TensorSpec:
    """Expected shape and type of a checkpoint's tensor.

    Attributes:
      shape: Usual shape.
      dtypes: Allowed types, the usual one first; empty means any.
      other_shapes: Other shapes that some publishers use.
      content: Elements of the tensor, if they are fixed.
      sample: Elements of a valid tensor, repeated as often as its shape needs; None means irregular scales if its
        usual type is a float of two bytes or more, otherwise zeros.
      any_length: True if a vector may have any length, like a string's bytes; `shape` is that of the sample.
      is_zero: True if the weight does not need the tensor: the file may lack it, or has zeros.
    """

    shape: tuple[int, ...]
    dtypes: tuple[np.dtype, ...] = ()
    other_shapes: tuple[tuple[int, ...], ...] = ()
    content: tuple[int, ...] | None = None
    sample: tuple[float, ...] | None = None
    any_length: bool = False
    is_zero: bool = False

    def example(self, number: int = 0) -> np.ndarray:
        """Makes a tensor; those with other numbers are no multiples of it."""
        dtype = self.dtypes[0] if self.dtypes else np.dtype(np.float32)
        elements = self.sample if self.content is None else self.content
        if elements is None and self.dtypes and dtype.kind in "fV" and dtype.itemsize > 1:
            elements = np.roll(_IRREGULAR, number)
        return np.zeros(self.shape, dtype) if elements is None else np.resize(np.asarray(elements, dtype), self.shape)

    def fits(self, shape: tuple[int, ...]) -> bool:
        return shape in (self.shape, *self.other_shapes) or (self.any_length and len(shape) == 1)


class WeightFormat(Protocol):
    """Storage in a checkpoint of a weight [out, in] of a linear layer, an embedding table or one expert."""

    def tensors(self, shape: tuple[int, ...]) -> Mapping[str, TensorSpec]:
        """Returns name suffix in the file -> spec, for each tensor of a weight [out, in]."""
        ...

    def assemble(self, tensors: Mapping[str, np.ndarray], shape: tuple[int, ...], /) -> WeightValue:
        """Builds a weight [out, in] of host arrays from its tensors, which match the specs of `tensors`.

        Raises:
          ValueError: The tensors do not form a valid weight; the message follows "a weight".
        """
        ...


@dataclass(frozen=True)
class PlainFormat:
    """One tensor: the weight itself."""

    def tensors(self, shape: tuple[int, ...]) -> Mapping[str, TensorSpec]:
        return {"weight": TensorSpec(shape)}

    def assemble(self, tensors: Mapping[str, np.ndarray], _shape: tuple[int, ...]) -> WeightValue:
        return tensors["weight"]


PLAIN = PlainFormat()


@dataclass(frozen=True)
class WeightSlot:
    """A parameter of a layer that holds a weight, or a stack of experts' weights.

    Attributes:
      name: Name of the attribute.
      shape: (out, in).
      axes: Logical axes of the parameter's dimensions.
      num_experts: X if the parameter is a stack [X, out, in]; None for a single weight.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    num_experts: int | None = None
