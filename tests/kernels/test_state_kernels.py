"""The kernels with a state against transformers' torch code, on every instruction set and in plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.state_kernels import (
    KERNELS,
    MIX,
    NUM_SLOTS,
    StateStep,
    check_step,
    check_whole_sequences,
    each_kernel,
)
from tests.support.kernel_paths import PLAIN, each_path, path  # noqa: F401

pytestmark = [each_path, pytest.mark.usefixtures("path")]


@pytest.mark.sampled(3)
@each_kernel()
def test_a_mix_of_requests_equals_transformers(name):
    check_step(KERNELS[name], MIX)


@pytest.mark.sampled(3)
@each_kernel(often=["delta rule, by channel", "ssd, 2 groups", "selective scan", "conv of 4"])
def test_whole_sequences_equal_transformers(name):
    check_whole_sequences(KERNELS[name], [70, 1, 9])


@pytest.mark.sampled(3)
@each_kernel(often=["delta rule, by channel", "ssd, 2 groups", "selective scan", "conv of 4"])
def test_a_step_without_requests_changes_nothing(name):
    kernel, rng = KERNELS[name], np.random.default_rng(2)
    state = rng.normal(size=(NUM_SLOTS, *kernel.state_shape)).astype(kernel.dtype)
    after, out = kernel.run(kernel.make_inputs(3, rng), state, StateStep((), pad_requests=2), [0, 0])
    np.testing.assert_array_equal(after, state)
    np.testing.assert_array_equal(out.astype(np.float32), 0)


@pytest.mark.sampled(3)
@each_kernel()
def test_bits_depend_neither_on_chunks_nor_on_the_batch_nor_on_kept_states(name, path):  # noqa: F811
    if path == PLAIN:
        pytest.skip("XLA does not promise it")
    kernel, rng, length, kept_after = KERNELS[name], np.random.default_rng(3), 21, 8
    program = kernel.jitted()
    inputs = kernel.make_inputs(length, rng)
    before = rng.normal(size=(4, *kernel.state_shape)).astype(kernel.dtype)
    whole, expected = kernel.run(inputs, before, StateStep(((length, -1, 0, 1, kept_after),)), [length], program)
    np.testing.assert_array_equal(kernel.run(inputs, None, None, [length])[1], expected)

    for chunk, first in ((1, 0), (7, 0), (1, kept_after), (7, kept_after)):
        # From zeros to slot 0, or from the state that was kept in slot 1 to slot 2.
        state, slot = (before, 0) if first == 0 else (whole, 2)
        for start in range(first, length, chunk):
            size = min(chunk, length - start)
            read = slot if start > first else (-1 if first == 0 else 1)
            part = [x[start : start + size] for x in inputs]
            state, out = kernel.run(part, state, StateStep(((size, read, slot, -1, 0),)), [size], program)
            np.testing.assert_array_equal(out, expected[start : start + size])
        np.testing.assert_array_equal(state[slot], whole[0])

    others = kernel.make_inputs(40, rng)
    batch = StateStep(((17, 3, 3, -1, 0), (length, -1, 0, 1, kept_after), (1, 2, 2, -1, 0)))
    mixed = [np.concatenate([o[:17], x, o[17:]]) for o, x in zip(others, inputs, strict=True)]
    state, out = kernel.run(mixed, before, batch, batch.lengths, program)
    np.testing.assert_array_equal(out[17 : 17 + length], expected)
    np.testing.assert_array_equal(state[:2], whole[:2])


@pytest.mark.sampled(4)
@each_kernel(often=["delta rule, by channel", "selective scan"])
def test_derivatives_are_the_definitions(name, path, monkeypatch):  # noqa: F811
    kernel = KERNELS[name]
    inputs = tuple(map(jnp.asarray, kernel.make_inputs(9, np.random.default_rng(4))))
    starts = jnp.asarray([0, 4, 9], jnp.int32)

    def loss(inputs):
        return jnp.sum(jnp.sin(kernel.call(inputs, None, None, starts, jnp.int32(2))[1]))

    gradients = jax.jit(jax.grad(loss))(inputs)
    if path == PLAIN:
        direction = kernel.make_inputs(9, np.random.default_rng(5))
        step = 1e-3
        moved = [loss(tuple(x + sign * step * d for x, d in zip(inputs, direction, strict=True))) for sign in (1, -1)]
        slope = sum(float(jnp.vdot(g, d)) for g, d in zip(gradients, direction, strict=True))
        np.testing.assert_allclose((moved[0] - moved[1]) / (2 * step), slope, rtol=2e-2, atol=2e-2)
        return
    monkeypatch.undo()
    monkeypatch.setattr("jaxis.kernels.native.library", lambda: None)
    expected = jax.jit(jax.grad(loss))(inputs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), gradients, expected)


@each_kernel(often=["delta rule, by channel", "ssd, 2 groups", "selective scan", "conv of 4"])
def test_a_donated_state_is_updated_in_place(name, path):  # noqa: F811
    if path == PLAIN:
        pytest.skip("XLA decides")
    kernel = KERNELS[name]
    inputs = kernel.make_inputs(2, np.random.default_rng(6))
    state = jnp.zeros((3, *kernel.state_shape), kernel.dtype)
    address = state.unsafe_buffer_pointer()
    step = StateStep(((2, -1, 1, -1, 0),))
    program = kernel.jitted(donate_argnums=1)
    state, _ = program(inputs, state, step.slots, jnp.asarray([0, 2], jnp.int32), jnp.int32(1))
    assert state.unsafe_buffer_pointer() == address
