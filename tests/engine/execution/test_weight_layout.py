"""Where arrays lie in memory; XLA's CPU backend knows layouts too."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout

from jaxis.engine.execution.weight_layout import laid_out, row_major
from jaxis.kernels.weights import BlockScaledWeight, QuantizedWeight
from jaxis.parallel.mesh import logical_sharding, make_mesh


@pytest.mark.parametrize("order", [(1, 0, 2), (2, 1, 0), (0, 1, 2)])
def test_an_array_is_moved_to_rows_once_with_its_elements(order):
    values = np.arange(2 * 3 * 5, dtype=np.float32).reshape(2, 3, 5)
    sharding = logical_sharding(make_mesh(), ("expert", "mlp", None), values.shape)
    array = jax.device_put(values, Format(Layout(major_to_minor=order), sharding))
    moved = row_major(array)
    assert moved.format.layout.major_to_minor == (0, 1, 2)
    assert moved.sharding == sharding
    np.testing.assert_array_equal(moved, values)
    assert row_major(moved) is moved


def test_shapes_say_where_their_arrays_will_lie():
    sharding = logical_sharding(make_mesh(), ("vocab", None), (8, 5))
    table = row_major(jax.ShapeDtypeStruct((8, 5), jnp.bfloat16, sharding=sharding))
    assert table.format.layout.major_to_minor == (0, 1)
    assert table.sharding == sharding


def test_vectors_and_random_keys_are_left_alone():
    for array in (jnp.ones(3), jax.random.key(0), jax.random.split(jax.random.key(0), (2, 3))):
        assert row_major(array) is array


def test_elements_lie_row_by_row_and_scales_column_by_column():
    def orders(weight):
        abstract = jax.tree.map(
            lambda array: jax.ShapeDtypeStruct(
                array.shape, array.dtype, sharding=logical_sharding(make_mesh(), None, array.shape)
            ),
            weight,
        )
        (moved,) = laid_out([abstract])
        return [array.format.layout.major_to_minor for array in jax.tree.leaves(moved)]

    in_groups = QuantizedWeight(np.zeros((2, 6, 64), np.int8), np.ones((2, 6, 2), np.float32))
    assert orders(in_groups) == [(0, 1, 2), (0, 2, 1)]
    in_blocks = BlockScaledWeight(np.zeros((6, 64), np.uint8), np.ones((3, 2), np.float32), (2, 64))
    assert orders(in_blocks) == [(0, 1), (0, 1)]
    assert orders(jnp.ones((6, 2))) == [(0, 1)]
