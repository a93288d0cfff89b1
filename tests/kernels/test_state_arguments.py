"""What does not fit a kernel with a state is an error that says what, and touches nothing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxis.kernels import native
from tests.kernels.state_kernels import KERNELS, NUM_SLOTS, StateStep

needs_library = pytest.mark.skipif(native.library() is None, reason="the native library is not built")
DELTA_RULE, SSD, CONV = (KERNELS[name] for name in ("delta rule, 2 heads a key", "ssd, 2 groups", "conv of 4"))
SCAN = KERNELS["selective scan"]
each_kernel = pytest.mark.parametrize(
    "kernel", [DELTA_RULE, SSD, SCAN, CONV], ids=["delta rule", "ssd", "selective scan", "conv"]
)


def error(message):
    # JAX raises either, as the program runs in the caller's thread or in another.
    return pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=f"INVALID_ARGUMENT: .*{message}")


def run(kernel, *, starts=(0, 2, 5), num=2, state=None, inputs=None, **slots):
    step = StateStep(((2, -1, 0, -1, 0), (3, 1, 2, 3, 1)))
    rng = np.random.default_rng(0)
    inputs = kernel.make_inputs(5, rng) if inputs is None else inputs
    state = jnp.zeros((NUM_SLOTS, *kernel.state_shape), kernel.dtype) if state is None else state
    changed = dataclasses.replace(step.slots, **{name: jnp.asarray(value) for name, value in slots.items()})
    return jax.block_until_ready(
        kernel.call(inputs, state, changed, jnp.asarray(starts, jnp.int32), jnp.asarray(num, jnp.int32))
    )


@pytest.mark.sampled(3)
@needs_library
@each_kernel
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"read": [0, NUM_SLOTS]}, f"read has slot {NUM_SLOTS} of {NUM_SLOTS}"),
        ({"write": [-2, 0]}, f"write has slot -2 of {NUM_SLOTS}"),
        ({"keep": [0, 1 << 30]}, "keep has slot"),
        ({"read": [0]}, r"write has shape \[2\], expected \[1\]"),
        ({"starts": (0, 2, 6)}, "query_start_loc has rows that are not there"),
        ({"starts": (0, 4, 2)}, "query_start_loc does not ascend"),
        ({"starts": (-1, 2, 5)}, "query_start_loc does not ascend"),
        ({"starts": (0, 2)}, "query_start_loc has shape"),
        ({"num": 3}, "more requests than slots are given for"),
        ({"num": -1}, "more requests than slots are given for"),
        ({"num": [2]}, "num_requests has shape"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_slots_and_rows_that_are_not_there(kernel, changes, message):
    with error(message):
        run(kernel, **changes)


@needs_library
@each_kernel
def test_a_state_of_another_shape(kernel):
    with error("the state has shape"):
        run(kernel, state=jnp.zeros((NUM_SLOTS, *kernel.state_shape[:-1], 5), kernel.dtype))


@needs_library
@each_kernel
def test_slots_of_requests_that_are_padding_may_be_anything(kernel):
    run(kernel, num=1, read=[0, 1 << 20], write=[0, -9], keep=[-1, 1 << 20])


@each_kernel
def test_a_state_needs_slots(kernel):
    inputs = kernel.make_inputs(5, np.random.default_rng(0))
    state = jnp.zeros((NUM_SLOTS, *kernel.state_shape), kernel.dtype)
    with pytest.raises(ValueError, match="a state and its slots are given together"):
        kernel.call(inputs, state, None, jnp.asarray([0, 5]), jnp.int32(1))


def test_what_does_not_fit_together():
    q, k, v, decay, beta = DELTA_RULE.make_inputs(5, np.random.default_rng(0))
    with pytest.raises(ValueError, match="2 key heads do not divide 3 value heads"):
        run(DELTA_RULE, inputs=(q, k, v[:, :3], decay[:, :3], beta[:, :3]))
    x, dt, b, c = SSD.make_inputs(5, np.random.default_rng(0))
    with pytest.raises(ValueError, match="3 groups do not divide 4 heads"):
        run(SSD, inputs=(x, dt, *(np.concatenate([y, y], 1)[:, :3] for y in (b, c))))
    (x,) = CONV.make_inputs(5, np.random.default_rng(0))
    with pytest.raises(ValueError, match="the state is float32, its inputs are bfloat16"):
        run(CONV, inputs=(jnp.asarray(x, jnp.bfloat16),))
