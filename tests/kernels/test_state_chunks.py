"""Recurrences by chunks of tokens, as devices with matrix units run them, against transformers' torch code."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxis.kernels.delta_rule import DeltaRuleOperands, reference
from jaxis.kernels.delta_rule import chunked as delta_rule
from jaxis.kernels.selective_scan import chunked as selective_scan
from jaxis.kernels.ssd import chunked as ssd
from jaxis.kernels.state_slots import RecurrentStates
from tests.kernels.state_kernels import KERNELS, MIX, StateStep, check_step, check_whole_sequences, each_kernel

NAMES = [name for name in KERNELS if not name.startswith("conv")]
LONG = StateStep(((150, -1, 0, -1, 0), (1, 1, 1, -1, 0), (130, 2, 3, 4, 100), (64, 5, 5, 6, 64), (1, 7, 8, 10, 1)))


@pytest.fixture(autouse=True)
def by_chunks(monkeypatch):
    monkeypatch.setattr("jaxis.kernels.native.library", lambda: None)
    for package in ("delta_rule", "selective_scan", "ssd"):
        monkeypatch.setattr(f"jaxis.kernels.{package}.target_platform", lambda: "tpu")


@pytest.fixture
def chunk_size(request, monkeypatch):
    monkeypatch.setattr(delta_rule, "CHUNK_SIZE", request.param)
    monkeypatch.setattr(delta_rule, "CHANNEL_CHUNK_SIZE", request.param)
    monkeypatch.setattr(selective_scan, "CHUNK_SIZE", request.param)
    monkeypatch.setattr(ssd, "CHUNK_SIZE", request.param)


small_chunks = pytest.mark.parametrize("chunk_size", [4], indirect=True)


@pytest.mark.sampled(3)
@each_kernel(NAMES)
@small_chunks
@pytest.mark.usefixtures("chunk_size")
def test_a_mix_of_requests(name):
    check_step(KERNELS[name], MIX)


@pytest.mark.sampled(3)
@each_kernel(NAMES)
def test_requests_of_many_chunks(name):
    check_step(KERNELS[name], LONG)


@pytest.mark.sampled(4)
@each_kernel(NAMES)
def test_whole_sequences(name):
    check_whole_sequences(KERNELS[name], [70, 1, 9])


@each_kernel(NAMES)
def test_the_chunked_kernels_were_what_ran(name, monkeypatch):
    def fail(*_, **__):
        raise AssertionError

    for module in (delta_rule, selective_scan, ssd):
        monkeypatch.setattr(module, "run_chunks", fail)
    with pytest.raises(AssertionError):
        check_whole_sequences(KERNELS[name], [3])


@pytest.mark.sampled(6)
@each_kernel(NAMES)
@small_chunks
@pytest.mark.usefixtures("chunk_size")
def test_derivatives_are_the_definitions(name, monkeypatch):
    kernel = KERNELS[name]
    inputs = tuple(map(jnp.asarray, kernel.make_inputs(9, np.random.default_rng(4))))
    starts = jnp.asarray([0, 7, 8, 9], jnp.int32)

    def loss(inputs):
        return jnp.sum(jnp.sin(kernel.call(inputs, None, None, starts, jnp.int32(3))[1]))

    gradients = jax.jit(jax.grad(loss))(inputs)
    for package in ("delta_rule", "selective_scan", "ssd"):
        monkeypatch.setattr(f"jaxis.kernels.{package}.target_platform", lambda: "cpu")
    expected = jax.jit(lambda inputs: jax.grad(loss)(inputs))(inputs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), gradients, expected)


def test_decays_that_underflow_are_finite():
    kernel = KERNELS["delta rule, 2 heads a key"]
    q, k, v, decay, beta = kernel.make_inputs(70, np.random.default_rng(5))
    decay[::7] = -1e4

    def run(function):
        options = {"l2_norm_epsilon": 1e-6, "scale": 1.0}
        starts = jnp.asarray([0, 70], jnp.int32)
        states = RecurrentStates(None, None, starts, jnp.int32(1))
        operands = DeltaRuleOperands(q, k, v, decay, beta, states)
        return jax.jit(lambda operands: function(operands, **options)[1])(operands)

    np.testing.assert_allclose(run(delta_rule.gated_delta_rule), run(reference.gated_delta_rule), rtol=1e-4, atol=2e-5)
