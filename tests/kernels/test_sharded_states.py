"""Kernels with a state on four devices, which share the heads or channels, against one device."""

import pytest

from tests.support.simulated_devices import run_on_devices

SCRIPT = """
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxis.parallel.mesh import make_mesh
from tests.kernels import state_kernels as states

mesh = make_mesh(4)
step, rng = states.MIX, np.random.default_rng(0)
starts = jnp.asarray(np.cumsum([0, *step.lengths]), jnp.int32)
kernels = {
    "key heads for two devices each": (states.delta_rule_kernel(2, 4, 16, 24), 1),
    "one key head": (states.delta_rule_kernel(1, 12, 16, 24, by_channel=True), 1),
    "heads that do not divide": (states.delta_rule_kernel(1, 6, 16, 24), None),
    "two groups": (states.ssd_kernel(8, 2, 16, 32), 1),
    "channels of a scan": (states.scan_kernel(24, 5), 2),
    "channels": (states.conv_kernel(24, 4, bias=True, activation="silu"), 2),
    "channels that do not divide": (states.conv_kernel(22, 3, bias=False, activation=None), None),
}
for name, (kernel, axis) in kernels.items():
    inputs = kernel.make_inputs(sum(step.lengths) + 4, rng)
    state = rng.normal(size=(states.NUM_SLOTS, *kernel.state_shape)).astype(np.float32)
    alone = kernel.run(inputs, state, step, step.lengths)
    spec = PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, "model")
    with jax.set_mesh(mesh):
        placed = jax.device_put(state, NamedSharding(mesh, spec))
        divided = kernel.jitted()(inputs, placed, step.slots, starts, jnp.int32(step.num))
        whole = kernel.jitted()(inputs, None, None, starts, jnp.int32(step.num))
    for ours, expected in zip(divided, alone):
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=2e-5, err_msg=name)
    assert divided[0].sharding.is_equivalent_to(placed.sharding, state.ndim), name
    np.testing.assert_array_equal(divided[0][states.UNTOUCHED], state[states.UNTOUCHED])
    assert whole[0] is None
    alone = kernel.run(inputs, None, None, step.lengths[: step.num])
    np.testing.assert_allclose(whole[1], alone[1], rtol=1e-4, atol=2e-5, err_msg=name)
"""


@pytest.mark.multi_device
def test_four_devices_give_what_one_does():
    run_on_devices("-c", SCRIPT)
