"""The rotary embedding against complex multiplication in float64, on every instruction set."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxis.kernels.rotary_embedding import HeadNorms, rotary_embedding, rotary_embedding_definition
from tests.support.kernel_paths import PLAIN, each_path, path  # noqa: F401

pytestmark = [each_path, pytest.mark.usefixtures("path")]

# Tokens, heads, kv heads, head size, pairs rotated: more than one task; partial; pairs that are no multiple of 16.
SHAPES = [(300, 4, 2, 128, 64), (7, 3, 1, 80, 20), (2, 1, 1, 66, 33), (0, 2, 1, 8, 4)]
EPSILON = 1e-6
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
interleavings = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])


def operands(tokens, heads, kv_heads, head_dim, pairs):
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(tokens, n, head_dim)).astype(np.float32) for n in (heads, kv_heads))
    angles = rng.uniform(0, 100, (tokens, pairs))
    norms = HeadNorms(*(rng.normal(size=head_dim).astype(np.float32) for _ in range(2)), EPSILON)
    return q, k, np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32), norms


def rotated_in_float64(x, weight, cos, sin, interleaved):
    x = x.astype(np.float64)
    if weight is not None:
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * weight
    pairs = cos.shape[1]
    first = slice(0, 2 * pairs, 2) if interleaved else slice(0, pairs)
    second = slice(1, 2 * pairs, 2) if interleaved else slice(pairs, 2 * pairs)
    product = (x[..., first] + 1j * x[..., second]) * (cos + 1j * sin.astype(np.float64))[:, None]
    x[..., first], x[..., second] = product.real, product.imag
    return x


@pytest.mark.sampled(8)
@shapes
@interleavings
@pytest.mark.parametrize("with_norms", [False, True], ids=["plain", "norms"])
def test_equals_complex_multiplication(shape, interleaved, with_norms):
    q, k, cos, sin, norms = operands(*shape)
    rotated = rotary_embedding(
        *map(jnp.asarray, (q, k, cos, sin)), interleaved=interleaved, norms=norms if with_norms else None
    )
    for x, weight, ours in zip((q, k), norms, rotated, strict=False):
        expected = rotated_in_float64(x, weight if with_norms else None, cos, sin, interleaved)
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)


@interleavings
def test_a_token_does_not_depend_on_the_others(interleaved, path):  # noqa: F811
    if path == PLAIN:
        pytest.skip("XLA does not promise it")
    q, k, cos, sin, norms = operands(300, 4, 2, 128, 64)
    turn = jax.jit(lambda *args: rotary_embedding(*args, interleaved=interleaved, norms=norms))
    together = turn(q, k, cos, sin)
    for start, stop in ((0, 1), (299, 300), (17, 82)):
        alone = turn(*(x[start:stop] for x in (q, k, cos, sin)))
        for part, whole in zip(alone, together, strict=True):
            np.testing.assert_array_equal(part, whole[start:stop])


@pytest.mark.sampled(3)
def test_derivatives_are_the_definitions():
    q, k, cos, sin, norms = operands(5, 2, 2, 66, 33)

    def loss(function):
        def of(q, k, q_weight, k_weight):
            rotated = function(q, k, cos, sin, interleaved=False, norms=HeadNorms(q_weight, k_weight, EPSILON))
            return sum(jnp.sum(jnp.sin(x)) for x in rotated)

        return jax.jit(jax.grad(of, argnums=(0, 1, 2, 3)))

    arguments = (q, k, norms.q_weight, norms.k_weight)
    ours, expected = loss(rotary_embedding)(*arguments), loss(rotary_embedding_definition)(*arguments)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), ours, expected)
