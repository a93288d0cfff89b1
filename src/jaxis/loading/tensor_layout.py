"""Layout of a checkpoint's named tensors in an Orbax checkpoint: one array each, or layers and experts stacked.

Unscanned, a tensor `model.layers.3.mlp.up_proj.weight` is the array at (model, layers, 3, mlp, up_proj, weight).
Scanned, the layers that have the same tensors are one array `[layers, ...]` at (model, layers, mlp, up_proj, weight),
and the experts below them another axis, for training with `jax.lax.scan` or `nnx.scan`. Different kinds of layers (the
first of DeepSeek V3 have no experts) make several stacks: (model, layers, group_0, ...), (model, layers, group_1, ...).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Path = tuple[str, ...]


@dataclass(frozen=True)
class Place:
    """The place of a tensor: the path of its array in the tree, and its index along leading axes, () for all of it."""

    path: Path
    index: tuple[int, ...]


@dataclass(frozen=True)
class ArraySpec:
    """An array of the tree: its shape, stacked axes first, and its type."""

    shape: tuple[int, ...]
    dtype: np.dtype


@dataclass(frozen=True)
class TensorLayout:
    """Places of all tensors by name, layer by layer, the best order for loading; and the flattened tree of arrays."""

    places: Mapping[str, Place]
    arrays: Mapping[Path, ArraySpec]

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON that `layout_from_json` reads: for each array, its tensors' names and their places."""
        names: dict[Path, list[Any]] = defaultdict(list)
        for name, place in self.places.items():
            names[place.path].append([name, *place.index])
        return {
            ".".join(path): {"shape": list(spec.shape), "dtype": spec.dtype.name, "tensors": names[path]}
            for path, spec in self.arrays.items()
        }


def unscanned_layout(tensors: Mapping[str, ArraySpec]) -> TensorLayout:
    names = sorted(tensors, key=natural_order)
    places = {name: Place(tuple(name.split(".")), ()) for name in names}
    return TensorLayout(places, {places[name].path: tensors[name] for name in names})


def scanned_layout(tensors: Mapping[str, ArraySpec]) -> TensorLayout:
    """Returns the layout with layers of the same tensors stacked along the first axis, experts along the next."""
    names = sorted(tensors, key=natural_order)
    places = _stack([(name, tuple(name.split("."))) for name in names], tensors)
    extents: dict[Path, list[tuple[int, ...]]] = defaultdict(list)
    for place in places.values():
        extents[place.path].append(place.index)
    arrays = {}
    for name in names:
        path = places[name].path
        stacked = tuple(int(size) for size in np.max(extents[path], axis=0) + 1) if places[name].index else ()
        arrays[path] = ArraySpec((*stacked, *tensors[name].shape), tensors[name].dtype)
    return TensorLayout({name: places[name] for name in names}, arrays)


def layout_from_json(arrays: Mapping[str, Any]) -> TensorLayout:
    """Reads the JSON of `TensorLayout.to_json`. Raises KeyError, TypeError or ValueError for anything else."""
    specs, places = {}, {}
    for path, entry in arrays.items():
        specs[tuple(path.split("."))] = ArraySpec(tuple(entry["shape"]), np.dtype(_extended_dtype(entry["dtype"])))
        for name, *index in entry["tensors"]:
            places[name] = Place(tuple(path.split(".")), tuple(index))
    return TensorLayout({name: places[name] for name in sorted(places, key=natural_order)}, specs)


def natural_order(name: str) -> list[Any]:
    """Returns a sort key that puts layer 10 after layer 9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _stack(names: Sequence[tuple[str, Path]], tensors: Mapping[str, ArraySpec]) -> dict[str, Place]:
    """The places of tensors with these paths below a common one."""
    own: list[tuple[str, Path]] = []
    below: dict[str, list[tuple[str, Path]]] = defaultdict(list)
    for name, path in names:
        if len(path) == 1:
            own.append((name, path))
        else:
            below[path[0]].append((name, path[1:]))
    places = {name: Place(path, ()) for name, path in own}
    numbered = sorted((key for key in below if key.isdigit()), key=int)
    is_list = [int(key) for key in numbered] == list(range(len(numbered))) and len(numbered) > 0
    for key, children in below.items():
        if not (is_list and key.isdigit()):
            for name, place in _stack(children, tensors).items():
                places[name] = Place((key, *place.path), place.index)
    if is_list:
        groups = _alike([_stack(below[key], tensors) for key in numbered], tensors)
        for number, group in enumerate(groups):
            where = () if len(groups) == 1 else (f"group_{number}",)
            for index, item in enumerate(group):
                for name, place in item.items():
                    places[name] = Place((*where, *place.path), (index, *place.index))
    return places


def _alike(items: Iterable[dict[str, Place]], tensors: Mapping[str, ArraySpec]) -> list[list[dict[str, Place]]]:
    """Groups the items whose tensors have the same shapes and types in the same places."""
    groups: dict[frozenset[Any], list[dict[str, Place]]] = {}
    for item in items:
        kind = frozenset((place, tensors[name].shape, tensors[name].dtype) for name, place in item.items())
        groups.setdefault(kind, []).append(item)
    return list(groups.values())


def _extended_dtype(name: str) -> Any:
    import ml_dtypes

    return getattr(ml_dtypes, name, name)
