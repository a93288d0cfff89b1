from __future__ import annotations

import math

import jax
from flax import nnx
from jax.sharding import Mesh

from jaxis.kernels.weights import WeightScheme
from jaxis.layers.module import JaxModule, named_modules, named_parameters
from jaxis.layers.weight_method import scheme_of_module
from jaxis.parallel.mesh import EXPERT_AXES, logical_sharding, padded_shape

_BITS = {"int8": 8, "int6": 6, "int5": 5, "int4": 4}


def weight_bytes(model: JaxModule, float_bytes: int = 2, mesh: Mesh | None = None) -> int:
    """Returns the bytes of a model's weights once loaded: `float_bytes` for each element, or its quantized size.

    The model is constructed abstractly, in the checkpoint's shapes. With a mesh, the bytes of all its devices are added
    up; each has a copy of parameters that they do not share.
    """
    schemes: dict[int, WeightScheme] = {}
    for _, module in named_modules(model):
        if (scheme := scheme_of_module(module)) is not None:
            schemes |= {id(param): scheme for param in _matrices(module)}
    total = 0
    for param in {id(param): param for _, param in named_parameters(model)}.values():
        scheme, shape = schemes.get(id(param)), jax.tree.leaves(param.get_value())[0].shape
        nbytes = float_bytes * math.prod(shape) if scheme is None else _quantized_bytes(shape, scheme)
        if mesh is not None and nbytes:
            nbytes = nbytes * _elements_on_all(param, shape, mesh) // math.prod(shape)
        total += nbytes
    return total


def _elements_on_all(param: nnx.Param, shape: tuple[int, ...], mesh: Mesh) -> int:
    """Returns the number of a parameter's elements on all devices together, including copies and padding."""
    axes = logical_axes(param) or (None,) * len(shape)
    held = padded_shape(mesh, axes, shape)
    return mesh.size * math.prod(logical_sharding(mesh, axes, held).shard_shape(held))


def logical_axes(param: nnx.Param) -> tuple[str | None, ...]:
    return tuple(param.get_metadata().get("logical_axes") or ())


def _matrices(module: nnx.Module) -> list[nnx.Param]:
    """Returns the parameters of a layer that are quantized: its matrix, or stacks of matrices for experts."""
    params = [value for value in vars(module).values() if isinstance(value, nnx.Param)]
    minimum = 3 if any(next(iter(logical_axes(param)), None) in EXPERT_AXES for param in params) else 2
    return [param for param in params if len(logical_axes(param)) >= minimum]


def _quantized_bytes(shape: tuple[int, ...], scheme: WeightScheme) -> int:
    elements, columns = math.prod(shape), shape[-1]
    groups = elements // columns * (1 if scheme.group_size is None else columns // scheme.group_size)
    # Scales are float32 per row or bfloat16 per group: see QuantizedWeight.
    return elements * _BITS[scheme.weight_qtype] // 8 + groups * (4 if scheme.group_size is None else 2)
