"""Strict loading of named tensors into a model's parameters, one tensor at a time.

Four levels, each overriding the one before: the default loader of a parameter; a parameter's own
`weight_loader(param, tensor, shard_id)`; a module's `load_weights(weights)`; the model's `load_weights(weights)`.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer

from jaxis.errors import CheckpointError
from jaxis.layers.checkpoint_names import checkpoint_names_of
from jaxis.layers.module import named_children
from jaxis.layers.weight_format import InvalidWeightError
from jaxis.loading.given_tensors import BorrowedArray
from jaxis.loading.headers import HeaderTensor
from jaxis.parallel.mesh import logical_sharding, put

Weights = Iterable[tuple[str, np.ndarray]]


@runtime_checkable
class TakesTensors(Protocol):
    """`weight_loader` of a parameter built from several tensors; it gets each tensor's name as `shard_id`."""

    def takes(self, tensor_name: str) -> bool:
        """Returns whether a tensor of this name, next to the parameter in the file, belongs to it."""
        ...


def default_weight_loader(param: nnx.Param, tensor: np.ndarray, shard_id: str | int | None = None) -> None:
    """Fills a parameter with a tensor of the same shape, cast to the parameter's type, on the parameter's devices.

    Raises:
      CheckpointError: The shapes differ, or a shard was given for a parameter that has no shards.
    """
    check_loadable(param, tensor, shard_id)
    param.set_value(place_parameter(param, tensor))


def check_loadable(param: nnx.Param, tensor: np.ndarray, shard_id: str | int | None = None) -> None:
    """Checks a tensor for the `weight_loader` of an unfused parameter.

    Raises:
      CheckpointError: The shapes differ, or a shard was given.
    """
    if shard_id is not None:
        raise unexpected_shard(shard_id)
    target = param.get_value()
    if tuple(tensor.shape) != tuple(target.shape):
        raise CheckpointError(f"has shape {list(tensor.shape)} in the checkpoint, {list(target.shape)} in the model")


def unexpected_shard(shard_id: str | int) -> CheckpointError:
    """Returns the error for a shard of a parameter that has no shards."""
    return CheckpointError(f"shard {shard_id!r} was given for a parameter that is not fused: it needs a weight_loader")


def place_parameter(param: nnx.Param, tensor: np.ndarray) -> jax.Array:
    """Returns the tensor as an array of the parameter's type, each device holding its own shard of it.

    It is transferred in its own type and cast on the device, while the next tensor is being read. A vector is cast
    before: each length would need a program of its own, which takes longer to compile than the cast.
    """
    dtype = param.get_value().dtype
    if isinstance(tensor, np.ndarray) and tensor.ndim == 1:
        tensor = tensor.astype(dtype)
    return place_array(tensor, param.get_metadata().get("logical_axes")).astype(dtype)


def place_array(tensor: np.ndarray | jax.Array, axes: tuple[str | None, ...] | None) -> jax.Array:
    """Places the tensor on the current mesh, sharded by its logical axes.

    A HeaderTensor, and an array of a model that is constructed without arrays, is returned unchanged.
    """
    if isinstance(tensor, HeaderTensor | Tracer):
        return cast(jax.Array, tensor)  # a HeaderTensor stands in for an array
    if isinstance(tensor, BorrowedArray):
        tensor = np.array(tensor)  # on a CPU, JAX's arrays may otherwise share its memory
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return jax.device_put(tensor)
    return put(tensor, logical_sharding(mesh, axes, tensor.shape))


@runtime_checkable
class LoadsWeights(Protocol):
    """A module that loads itself: `load_weights(weights)`, or, for a model, the older guide's `load_weights(rng)`."""

    @property
    def load_weights(self) -> Callable[..., Any]:
        """Fills the parameters."""
        ...


@runtime_checkable
class HasFusedModules(Protocol):
    """A model with modules that fuse several of the checkpoint's."""

    @property
    def packed_modules_mapping(self) -> Mapping[str, Sequence[str]]:
        """Name of a fused module -> names of its parts in the checkpoint."""
        ...


class JaxAutoWeightsLoader:
    """Loader that passes each tensor to the parameter or module that its dotted name leads to.

    A name whose last-but-one part is fused into another module (`q_proj` in `qkv_proj`) is found through the model's
    `packed_modules_mapping`, {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}: the fused parameter's `weight_loader` gets
    the part's name as `shard_id`.
    """

    def __init__(self, model: nnx.Module) -> None:
        self.model = model
        mapping: Mapping[str, Sequence[str]] = {}
        if isinstance(model, HasFusedModules):
            mapping = model.packed_modules_mapping
        self._names = checkpoint_names_of(model)
        self.parts_of = mapping
        self.fused_by_part = {part: fused for fused, parts in mapping.items() for part in parts}
        self._parts_seen: dict[tuple[str, str], set[str]] = defaultdict(set)
        self._last_filled: nnx.Param | None = None

    def load_weights(self, weights: Weights) -> set[str]:
        """Fills the model's parameters; returns the names of the parameters that were filled.

        Raises:
          CheckpointError: A tensor matches no parameter or module, or has the wrong shape; or a fused parameter lacks a
            part.
        """
        named = ((n.split("."), self._names.name_in_checkpoint(n), t) for n, t in weights)
        filled = set(self._load_into(self.model, "", named, is_root=True))
        for (fused, name), seen in self._parts_seen.items():
            if missing := [part for part in self.parts_of[fused] if part not in seen]:
                raise CheckpointError(f"the checkpoint has {', '.join(sorted(seen))} of {name!r}, but not {missing[0]}")
        return filled

    def _load_into(
        self,
        module: nnx.Module,
        prefix: str,
        weights: Iterable[tuple[list[str], str, np.ndarray]],
        *,
        is_root: bool = False,
    ) -> Iterator[str]:
        """Loads (parts of the name below this module, full name in the checkpoint, tensor) triples."""
        if not is_root and isinstance(module, LoadsWeights):
            yield from _load_own(module, prefix, weights, self._names.name_in_checkpoint(prefix.removesuffix(".")))
            return
        children = dict(named_children(module))
        # Consecutive tensors of one child are passed on together, so that a module sees them as one stream.
        for key, group in itertools.groupby(weights, key=lambda weight: self._child_key(children, weight[0])):
            child = children.get(key)
            if isinstance(child, nnx.Module):
                depth = key.count(".") + 1
                yield from self._load_into(child, f"{prefix}{key}.", ((p[depth:], n, t) for p, n, t in group))
                continue
            for parts, full_name, tensor in group:
                shard_id = parts[0] if key in self.fused_by_part and key not in children else None
                is_whole_name = len(parts) == key.count(".") + 1
                target = self._fused_child(children, parts) if shard_id else child if is_whole_name else None
                if target is None and (made_of := _made_of(children, ".".join(parts))) is not None:
                    target, shard_id = children[made_of], ".".join(parts)
                if not isinstance(target, nnx.Param):
                    where = type(self.model).__name__
                    shape = list(tensor.shape)
                    raise CheckpointError(f"tensor {full_name!r} {shape} has no parameter in {where}", tensor=full_name)
                fill_parameter(target, full_name, tensor, shard_id)
                # A cast overlaps with reading the next tensor. Its file pages are released two tensors later, so it
                # must finish first.
                if self._last_filled is not None:
                    jax.block_until_ready(self._last_filled.get_value())
                self._last_filled = target
                parameter_name = prefix + ".".join(parts)
                if shard_id in self.fused_by_part:
                    fused = self.fused_by_part[shard_id]
                    parameter_name = prefix + ".".join([fused, *parts[1:]])
                    self._parts_seen[fused, parameter_name].add(shard_id)
                yield parameter_name

    def _child_key(self, children: dict[str, nnx.Module | nnx.Param], parts: list[str]) -> str:
        """Returns the key of the child that the first parts name, such as `layers.0`; without one, the first part."""
        for depth in range(1, len(parts) + 1):
            key = ".".join(parts[:depth])
            if key in children:
                return key
        # No parts are left if the tensor has the name of a module, not of a parameter.
        return parts[0] if parts else ""

    def _fused_child(self, children: dict[str, nnx.Module | nnx.Param], parts: list[str]) -> nnx.Param | None:
        """Returns the parameter of the fused module: `q_proj.weight` -> `qkv_proj`'s `weight`."""
        fused = children.get(self.fused_by_part[parts[0]])
        if not isinstance(fused, nnx.Module) or len(parts) != 2:
            return None
        child = dict(named_children(fused)).get(parts[1])
        return child if isinstance(child, nnx.Param) else None


def _load_own(
    module: LoadsWeights, prefix: str, weights: Iterable[tuple[list[str], str, np.ndarray]], name_in_checkpoint: str
) -> Iterator[str]:
    """Yields the names of the parameters that the module's own `load_weights` filled; it must take every tensor."""
    weights = iter(weights)
    try:
        filled: Iterable[str] = module.load_weights((".".join(parts), tensor) for parts, _, tensor in weights) or ()
    except CheckpointError as error:
        raise CheckpointError(f"{name_in_checkpoint}: {error}", tensor=error.tensor) from None
    for name in filled:
        yield f"{prefix}{name}"
    for _, full_name, tensor in weights:
        where = type(module).__name__
        shape = list(tensor.shape)
        raise CheckpointError(f"tensor {full_name!r} {shape} was not read by {where}.load_weights", tensor=full_name)


def _made_of(children: dict[str, nnx.Module | nnx.Param], tensor_name: str) -> str | None:
    """Returns the name of the parameter built from this tensor and others; None if there is none."""
    for name, child in children.items():
        if isinstance(child, nnx.Param):
            loader = child.get_metadata().get("weight_loader")
            if isinstance(loader, TakesTensors) and loader.takes(tensor_name):
                return name
    return None


def fill_parameter(param: nnx.Param, name: str, tensor: np.ndarray, shard_id: str | int | None = None) -> None:
    """Runs the parameter's own `weight_loader`, or the default one; errors name the tensor."""
    weight_loader = param.get_metadata().get("weight_loader", default_weight_loader)
    try:
        weight_loader(param, tensor, shard_id)
    except InvalidWeightError as error:
        module = name.removesuffix(f".{shard_id}") if shard_id is not None else name.rpartition(".")[0]
        raise CheckpointError(f"{module} {error}") from None
    except CheckpointError as error:
        raise CheckpointError(f"tensor {name!r} {error}", tensor=name) from None
