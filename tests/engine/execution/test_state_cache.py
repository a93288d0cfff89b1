"""The memory of recurrent states."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

from jaxis.engine.execution.state_cache import slot_bytes
from jaxis.layers.state_cache_spec import StateArray, StateCacheSpec
from jaxis.parallel.mesh import MESH_AXES


@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_a_state_that_devices_cannot_share_is_counted_on_each(num_devices: int) -> None:
    mesh = AbstractMesh((1, num_devices), MESH_AXES, axis_types=(AxisType.Auto,) * 2)
    divisible = StateArray((4, 8, 8), ("heads", None, None), jnp.float32)
    odd = StateArray((3, 8, 8), ("heads", None, None), jnp.float32)
    whole = StateArray((5, 16), (None, None))  # in the type of the activations

    total = slot_bytes([StateCacheSpec((whole, divisible)), StateCacheSpec((odd,))], jnp.bfloat16, mesh)

    assert total == 4 * 8 * 8 * 4 + num_devices * (3 * 8 * 8 * 4 + 5 * 16 * 2)


def test_slots_of_a_real_mesh() -> None:
    mesh = jax.sharding.Mesh([[jax.devices()[0]]], MESH_AXES)
    assert slot_bytes([StateCacheSpec((StateArray((2, 3), (None, None), jnp.float32),))], jnp.float32, mesh) == 24
