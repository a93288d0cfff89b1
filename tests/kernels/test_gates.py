"""Gates: the native kernels against float64, and the same bits wherever an element is."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from jaxis.kernels import native
from jaxis.kernels.gates import ACTIVATIONS, gated, gated_definition, softmax, softplus

needs_native = pytest.mark.skipif(not native.usable(), reason="needs the native kernels")


def logits(*shape: int) -> np.ndarray:
    return (6 * np.random.default_rng(0).standard_normal(shape)).astype(np.float32)


def exact_gate(x: np.ndarray, activation: str) -> np.ndarray:
    x = x.astype(np.float64)
    sigmoid = 1 / (1 + np.exp(-x))
    return {
        "sigmoid": sigmoid,
        "silu": x * sigmoid,
        "softplus": np.logaddexp(0, x),
        "normal_cdf": scipy.special.ndtr(x),
    }[activation]


@pytest.mark.parametrize("size", [1, 6, 15, 16, 17, 48])
def test_softplus(size: int) -> None:
    x, bias = logits(40, size), logits(size)
    expected = np.logaddexp(0, (x + bias).astype(np.float64))
    np.testing.assert_allclose(softplus(jnp.asarray(x), jnp.asarray(bias)), expected, rtol=5e-7)


@pytest.mark.parametrize("size", [1, 6, 8, 64, 65, 128])
def test_softmax(size: int) -> None:
    x = logits(40, size)
    powers = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    np.testing.assert_allclose(softmax(jnp.asarray(x)), powers / powers.sum(-1, keepdims=True), rtol=1e-5, atol=1e-30)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("size", "shared_by"), [(1, 5), (6, 1), (6, 24), (17, 1), (64, 1), (20, 16)])
def test_gated(activation: str, size: int, shared_by: int) -> None:
    x, gates = logits(9, size * shared_by), logits(9, size)
    expected = x * np.repeat(exact_gate(gates, activation), shared_by, axis=1)
    # A tail of the normal distribution is right as a part of the whole, not of itself.
    atol = 3e-7 * np.abs(x).max() if activation == "normal_cdf" else 1e-30
    np.testing.assert_allclose(gated(jnp.asarray(x), jnp.asarray(gates), activation), expected, rtol=1e-6, atol=atol)


@needs_native
@pytest.mark.parametrize("rows", [1, 2, 7, 33])
def test_the_bits_of_a_row_do_not_depend_on_how_many_there_are(rows: int) -> None:
    x, gates, bias = jnp.asarray(logits(64, 8)), jnp.asarray(logits(64, 8)), jnp.asarray(logits(8))

    @jax.jit
    def run(x: jax.Array, gates: jax.Array) -> tuple[jax.Array, ...]:
        return (softplus(x, bias), softmax(x), *(gated(x, gates, activation) for activation in ACTIVATIONS))

    for whole, part in zip(run(x, gates), run(x[:rows], gates[:rows]), strict=True):
        np.testing.assert_array_equal(np.asarray(whole)[:rows], part)


@needs_native
def test_gradients_are_the_definition_s() -> None:
    x, gates = jnp.asarray(logits(3, 8)), jnp.asarray(logits(3, 4))
    found = jax.grad(lambda x, gates: gated(x, gates, "silu").sum(), argnums=(0, 1))(x, gates)
    expected = jax.grad(lambda x, gates: gated_definition(x, gates, "silu").sum(), argnums=(0, 1))(x, gates)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
