"""Rows of a linear layer's weight in the order in which the devices of a mesh need them.

The outputs are cut into equal parts, one for each device. A device that needs other rows would have to get their
outputs from other devices in every step. So rows are put in order once, after loading.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from jaxis.kernels.weights import WeightValue, take_rows
from jaxis.layers.linear import JaxLinear
from jaxis.layers.weight_method import WeightMethod
from jaxis.parallel.mesh import logical_sharding


class RowOrder(NamedTuple):
    """Order of the rows of a layer's weight [out, in] for some number of devices.

    `rows` are indices of outputs, int [n]; devices' copies of a row are interchangeable.
    """

    layer: JaxLinear
    rows: np.ndarray


def has_movable_rows(layer: JaxLinear) -> bool:
    """Returns whether jaxis knows how the layer's weight is stored, which an external model's method decides itself."""
    return isinstance(layer.quant_method, WeightMethod)


def put_in_order(order: RowOrder) -> None:
    """Reorders the rows of a loaded layer's weight and bias, each device with its own part."""
    layer, rows = order
    layer.has_moved_rows = True
    layer.weight.set_value(_on_devices(layer.weight.get_value(), rows, layer.kernel_axes))
    if layer.bias is not None:
        layer.bias.set_value(_on_devices(layer.bias.get_value(), rows, layer.kernel_axes[:1]))


def _on_devices(value: WeightValue, rows: np.ndarray, axes: tuple[str | None, ...]) -> WeightValue:
    take = functools.partial(take_rows, rows=rows)
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value)):
        return take(value)
    mesh = jax.sharding.get_mesh()
    shardings = jax.tree.map(lambda array: logical_sharding(mesh, axes, array.shape), jax.eval_shape(take, value))
    return jax.jit(take, out_shardings=shardings)(value)
