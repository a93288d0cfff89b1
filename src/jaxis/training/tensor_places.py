"""Places of a checkpoint's tensors within a model's parameters: the inverse of loading.

Most tensors are parameters of the same name and shape. Others, such as the experts of a mixture, are parts of a stack,
or are cut and transposed. Their places are found by loading tensors that hold coordinates instead of weights. This is
correct for every family whose loading only moves elements.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxis.errors import ConfigError
from jaxis.layers.checkpoint_names import checkpoint_names_of
from jaxis.layers.module import JaxModule
from jaxis.models.common.interfaces import RenamesTensors
from jaxis.models.model_loader import loader_of
from jaxis.training.functional_model import values_of

_MAX_SIZE = 1 << 24  # float32 holds every integer up to here


@dataclass(frozen=True)
class _Stacked:
    """The source of each element of a parameter that consists of several tensors.

    `tensor`, int32 of the parameter's shape, is the index of the tensor that each element comes from; `places` is its
    index within that tensor, one array for each axis of tensors.
    """

    tensor: np.ndarray
    places: tuple[np.ndarray, ...]


@dataclass
class TensorPlaces:
    """A checkpoint's tensors as parts of parameters.

    Attributes:
      parameter_of: Parameter of each tensor that is a whole parameter, by the tensor's name.
      numbers: Index of each tensor that is part of a parameter, by name.
      shapes: Shapes of those tensors, by name.
      stacked: Parameters that consist of such tensors.
      parts_of: By tensor index, the (parameter, index on its first axis) pairs that hold its elements.
    """

    parameter_of: Mapping[str, str]
    numbers: Mapping[str, int] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    stacked: Mapping[str, _Stacked] = field(default_factory=dict)
    parts_of: Mapping[int, list[tuple[str, int]]] = field(default_factory=dict)

    def tensor_of(self, name: str, parameters: Mapping[str, np.ndarray]) -> np.ndarray | None:
        """Returns a checkpoint's tensor from parameters, by their names in jaxis; None if it is not part of them."""
        if (whole := self.parameter_of.get(name)) is not None:
            return parameters.get(whole)
        number = self.numbers.get(name)
        if number is None or number not in self.parts_of:
            return None
        tensor = np.zeros(self.shapes[name], np.float32)
        for parameter, index in self.parts_of[number]:
            stacked = self.stacked[parameter]
            is_here = stacked.tensor[index] == number
            tensor[tuple(axis[index][is_here] for axis in stacked.places)] = parameters[parameter][index][is_here]
        return tensor


def find_places(
    model: JaxModule,
    construct: Callable[[], JaxModule],
    tensors: Mapping[str, tuple[int, ...]],
    source: object,
    read: Callable[[str], np.ndarray] | None,
) -> TensorPlaces:
    """Finds the places of a checkpoint's tensors, given by their shapes.

    `construct` makes the model again, without weights. `read` reads a tensor; None if the model does not hold the
    checkpoint's values. It tells a square matrix that loading transposes from one that loading keeps. Raises
    ConfigError, which names `source`, if loading of a parameter cannot be inverted.
    """
    values = values_of(model)
    shapes = {name: value.shape for name, value in values.items()}
    rename = model.parameter_name if isinstance(model, RenamesTensors) else checkpoint_names_of(model).name_here
    parameter_of = {
        name: here
        for name, shape in tensors.items()
        if shapes.get(here := rename(name)) == tuple(shape)
        and (len(shape) < 2 if read is None else _is_same(values[here], read(name)))
    }
    missing = sorted(set(shapes) - set(parameter_of.values()))
    if not missing:
        return TensorPlaces(parameter_of)
    others = {name: tuple(shape) for name, shape in tensors.items() if name not in parameter_of}
    if any(max(shape, default=1) > _MAX_SIZE for shape in others.values()):
        raise ConfigError(f"{missing[0]} cannot be trained: {source} has it in tensors that are too long")

    def load(value_of: Callable[[str, tuple[int, ...]], np.ndarray]) -> dict[str, np.ndarray]:
        """Returns the missing parameters as loaded from tensors of integers that `value_of` makes of name and shape."""
        probed = construct()
        loader_of(probed).load_weights((name, value_of(name, shape)) for name, shape in others.items())
        loaded = values_of(probed)
        for name in missing:
            if not isinstance(value := loaded[name], jax.Array) or value.shape != shapes[name]:
                raise ConfigError(
                    f"{name} cannot be trained: {source} has not all of it, or otherwise; set training.use_peft, which "
                    "trains adapters"
                )
        return {name: np.asarray(loaded[name]).astype(np.int32) for name in missing}

    numbers = {name: number for number, name in enumerate(others, start=1)}
    tensor_numbers = load(lambda name, shape: np.broadcast_to(np.float32(numbers[name]), shape))
    axes = range(max(len(shape) for shape in others.values()))
    coordinates = [load(functools.partial(_coordinate, axis)) for axis in axes]
    num_axes = {numbers[name]: len(shape) for name, shape in others.items()}
    stacked: dict[str, _Stacked] = {}
    parts_of: dict[int, list[tuple[str, int]]] = {}
    for name in missing:
        first = int(tensor_numbers[name].flat[0])
        stacked[name] = _Stacked(tensor_numbers[name], tuple(axis[name] for axis in coordinates[: num_axes[first]]))
        for index, part in enumerate(tensor_numbers[name]):
            for tensor_number in np.unique(part).tolist():
                parts_of.setdefault(tensor_number, []).append((name, index))
    return TensorPlaces(parameter_of, numbers, others, stacked, parts_of)


def _is_same(value: Any, tensor: np.ndarray) -> bool:
    mine = np.atleast_2d(np.asarray(value))
    # Row by row, so that no large tensor is copied.
    rows = zip(mine, np.atleast_2d(tensor), strict=True)
    return all(np.array_equal(row, theirs.astype(np.float32)) for row, theirs in rows)


def _coordinate(axis: int, _name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns a tensor whose elements are their indices on an axis; zeros if it has no such axis."""
    if axis >= len(shape):
        return np.broadcast_to(np.float32(0), shape)
    lengths = [1] * len(shape)
    lengths[axis] = shape[axis]
    return np.broadcast_to(np.arange(shape[axis], dtype=np.float32).reshape(lengths), shape)
