"""The arrays of a model's weights on each device once they are loaded, from a model constructed without weights."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxis.kernels.weights import WeightScheme
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.latent_projection import LatentUpProjection
from jaxis.layers.module import JaxModule, named_modules, named_parameters
from jaxis.layers.partial_weight import WeightLoader
from jaxis.layers.weight_format import PLAIN, InvalidWeightError, WeightFormat
from jaxis.layers.weight_recipe import WeightRecipe
from jaxis.parallel.mesh import EXPERT_AXES, MESH_AXES, MODEL_AXIS, SPREAD_EXPERT, logical_sharding, padded_shape

ONE_DEVICE = AbstractMesh((1, 1), MESH_AXES, axis_types=(AxisType.Auto,) * 2)
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


def weight_bytes(model: JaxModule, mesh: Mesh | AbstractMesh = ONE_DEVICE, float_bytes: int | None = None) -> int:
    """Returns the bytes of a model's weights on all devices of a mesh together; see `stored_weights`."""
    return mesh.size * sum(weight.device_bytes for weight in stored_weights(model, mesh, float_bytes=float_bytes))


def stored_weights(
    model: JaxModule,
    mesh: Mesh | AbstractMesh = ONE_DEVICE,
    *,
    spreads_experts: bool = False,
    float_bytes: int | None = None,
) -> list[StoredWeight]:
    """Lists every parameter of a model as each device would hold it; shared ones count once.

    `spreads_experts` puts whole experts on devices, as expert parallelism does. `float_bytes` is the size of an element
    of packed floats, which keep the checkpoint's type; None is that of the model's. Raises ConfigError if the devices
    cannot share the model's heads equally.
    """
    by_heads = {id(m.weight): m for _, m in named_modules(model) if isinstance(m, LatentUpProjection)}
    copies = _copies(model, mesh.shape[MODEL_AXIS])
    stored = []
    for name, param in {id(param): (name, param) for name, param in named_parameters(model)}.values():
        axes = logical_axes(param) or (None,) * len(param.get_value().shape)
        shape = padded_shape(mesh, axes, param.get_value().shape)
        is_expert = axes[0] in EXPERT_AXES if axes else False
        if is_expert and spreads_experts:
            axes = (SPREAD_EXPERT, *(None for _ in axes[1:]))
        elements = _on_one_device(mesh, axes, shape)
        loader = param.get_metadata().get("weight_loader")
        recipe = loader.recipe if isinstance(loader, WeightLoader) else WeightRecipe()
        if (layer := by_heads.get(id(param))) is not None and not (recipe.packs and layer.keeps_panels):
            recipe = WeightRecipe()  # it is kept in floats
        if recipe.format is PLAIN and recipe.scheme is None:
            kept = float_bytes if recipe.packs else None
            nbytes = elements * (kept or param.get_value().dtype.itemsize)
        else:
            arrays = _arrays(recipe, shape, param.get_value().dtype)
            if recipe.packs:  # in panels, which devices share as they do the rows
                nbytes = sum(map(_nbytes, arrays)) * elements // math.prod(shape)
            else:
                nbytes = sum(_on_one_device(mesh, axes, a.shape) * a.dtype.itemsize for a in arrays)
        is_matrix = len(shape) >= (3 if is_expert else 2)
        repeats = copies.get(id(param), 1)
        stored.append(StoredWeight(name, int(nbytes * repeats), int(elements * repeats) if is_matrix else 0))
    return stored


def logical_axes(param: nnx.Param) -> tuple[str | None, ...]:
    return tuple(param.get_metadata().get("logical_axes") or ())


def _copies(model: JaxModule, num_devices: int) -> dict[int, float]:
    """Maps a parameter's id to the number of copies of its rows on all devices together, for parameters with copies."""
    layers = [module for _, module in named_modules(model) if isinstance(module, GroupedQueryAttention)]
    orders = [order for layer in layers for order in layer.row_orders(num_devices)]
    return {id(layer.weight): len(rows) / layer.output_size for layer, rows in orders}


def _on_one_device(mesh: Mesh | AbstractMesh, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> int:
    """Counts the elements of an array that one device holds."""
    return math.prod(logical_sharding(mesh, axes, shape).shard_shape(shape))


def _nbytes(array: jax.ShapeDtypeStruct) -> int:
    return math.prod(array.shape) * array.dtype.itemsize


def _arrays(recipe: WeightRecipe, shape: tuple[int, ...], dtype: np.dtype) -> _Arrays:
    """Returns the arrays of a weight [..., out, in], padding included."""
    *experts, rows, columns = shape
    facts = (recipe.format, recipe.dequantizes, recipe.scheme, recipe.act_qtype, recipe.packs)
    matrix = _matrix(*facts, (rows, columns), np.dtype(dtype))
    return tuple(jax.ShapeDtypeStruct((*experts, *a.shape), a.dtype) for a in matrix)


@functools.cache  # layers are alike, and recipes compare equal whatever they make
def _matrix(
    weight_format: WeightFormat,
    dequantizes: bool,
    scheme: WeightScheme | None,
    act_qtype: str | None,
    packs: bool,
    shape: tuple[int, int],
    dtype: np.dtype,
) -> _Arrays:
    """Returns the arrays of a weight [out, in]: makes those of a few rows, and grows them to all rows."""
    recipe = WeightRecipe(weight_format, dequantizes, scheme, act_qtype, packs)
    rows, columns = shape
    few, more = _EXAMPLE_ROWS
    try:
        small = recipe.example((few, columns), dtype) if rows > more else None
        large = recipe.example((min(rows, more), columns), dtype)
    except (InvalidWeightError, ValueError):  # a format that is only for this shape
        small, large = None, recipe.example(shape, dtype)
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
