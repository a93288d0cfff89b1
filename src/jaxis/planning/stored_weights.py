"""The arrays of a model's weights on each device, from a model that was constructed without weights."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh

from jaxis.compilation.abstract_model import example_weight
from jaxis.kernels.weights import WeightScheme
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.latent_projection import LatentUpProjection
from jaxis.layers.module import JaxModule, named_modules, named_parameters
from jaxis.layers.partial_weight import WeightLoader
from jaxis.layers.weight_bytes import logical_axes
from jaxis.layers.weight_format import PLAIN, InvalidWeightError, WeightFormat
from jaxis.layers.weight_recipe import WeightRecipe
from jaxis.parallel.mesh import EXPERT_AXES, SPREAD_EXPERT, logical_sharding, padded_shape
from jaxis.planning.layout import Layout

# Rows of the two examples that tell how a weight's arrays grow with its rows: a multiple of every format's blocks.
_EXAMPLE_ROWS = (128, 256)


@dataclass(frozen=True)
class StoredWeight:
    """A parameter's bytes on each device, scales included, and the elements of its matrices; 0 for vectors."""

    name: str
    device_bytes: int
    device_elements: int


# The arrays of a weight that is not there.
_Arrays = tuple[jax.ShapeDtypeStruct, ...]


def stored_weights(model: JaxModule, layout: Layout) -> list[StoredWeight]:
    """Lists every parameter of a model as each device would hold it; shared ones count once.

    The abstract model has its quantization, but no packing for the native kernels. Raises ConfigError if the devices
    cannot share its heads equally.
    """
    mesh = layout.mesh()
    # Its matrices multiply heads one by one, and are kept in floats.
    floats = {id(module.weight) for _, module in named_modules(model) if isinstance(module, LatentUpProjection)}
    copies = _copies(model, layout.tensor_parallel_size)
    stored = []
    for name, param in {id(param): (name, param) for name, param in named_parameters(model)}.values():
        axes = logical_axes(param) or (None,) * len(param.get_value().shape)
        shape = padded_shape(mesh, axes, param.get_value().shape)
        arrays = (_plain(param, shape),) if id(param) in floats else _arrays_of(param, shape)
        is_expert = axes[0] in EXPERT_AXES if axes else False
        if is_expert and layout.enable_expert_parallel:
            axes = (SPREAD_EXPERT, *(None for _ in axes[1:]))
        is_matrix = len(shape) >= (3 if is_expert else 2)
        nbytes = sum(_on_one_device(mesh, axes, a.shape) * jnp.dtype(a.dtype).itemsize for a in arrays)
        elements = _on_one_device(mesh, axes, shape) if is_matrix else 0
        repeats = copies.get(id(param), 1)
        stored.append(StoredWeight(name, int(nbytes * repeats), int(elements * repeats)))
    return stored


def _copies(model: JaxModule, num_devices: int) -> dict[int, float]:
    """Maps a parameter's id to the number of copies of its rows on all devices together, for parameters with copies."""
    layers = [module for _, module in named_modules(model) if isinstance(module, GroupedQueryAttention)]
    orders = [order for layer in layers for order in layer.row_orders(num_devices)]
    return {id(layer.weight): len(rows) / layer.output_size for layer, rows in orders}


def _on_one_device(mesh: AbstractMesh, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> int:
    """Counts the elements of an array that one device holds."""
    return math.prod(logical_sharding(mesh, axes, shape).shard_shape(shape))


def _plain(param: nnx.Param, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, param.get_value().dtype)


def _arrays_of(param: nnx.Param, shape: tuple[int, ...]) -> _Arrays:
    """Returns the arrays of a parameter of this shape, padding included."""
    loader = param.get_metadata().get("weight_loader")
    if not isinstance(loader, WeightLoader):
        return (_plain(param, shape),)
    recipe, slot = loader.recipe, loader.slot
    rows, columns = shape[-2:]
    matrix = _matrix(recipe.format, recipe.dequantizes, recipe.scheme, (rows, columns), np.dtype(loader.dtype))
    if slot.num_experts is None:
        return matrix
    return tuple(jax.ShapeDtypeStruct((slot.num_experts, *a.shape), a.dtype) for a in matrix)


@functools.cache  # layers are alike
def _matrix(
    weight_format: WeightFormat,
    dequantizes: bool,
    scheme: WeightScheme | None,
    shape: tuple[int, int],
    dtype: np.dtype,
) -> _Arrays:
    """Returns the arrays of a weight [out, in]: makes those of a few rows, and grows them to all rows."""
    if weight_format is PLAIN and scheme is None:
        return (jax.ShapeDtypeStruct(shape, dtype),)
    recipe = WeightRecipe(weight_format, dequantizes, scheme)
    rows, columns = shape
    few, more = _EXAMPLE_ROWS
    try:
        small = example_weight(recipe, (few, columns), dtype) if rows > more else None
        large = example_weight(recipe, (min(rows, more), columns), dtype)
    except (InvalidWeightError, ValueError):  # a format that is only for this shape
        small, large = None, example_weight(recipe, shape, dtype)
    arrays = jax.tree.leaves(large)
    shapes = [tuple(array.shape) for array in arrays]
    if small is not None:
        smaller = [tuple(array.shape) for array in jax.tree.leaves(small)]
        shapes = [
            tuple(b + math.ceil((b - a) * (rows - more) / (more - few)) for a, b in zip(*pair, strict=True))
            for pair in zip(smaller, shapes, strict=True)
        ]
    is_plain = isinstance(large, np.ndarray | jax.Array)
    return tuple(
        jax.ShapeDtypeStruct(shape, dtype if is_plain else array.dtype)
        for shape, array in zip(shapes, arrays, strict=True)
    )
