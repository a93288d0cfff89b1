"""Attention without a cache and its derivative, against the definition in NumPy and XLA's derivative of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxis.kernels.sequence_attention import sequence_attention
from jaxis.training.functional_model import recomputed
from tests.support.kernel_paths import each_path, path  # noqa: F401

pytestmark = [each_path, pytest.mark.usefixtures("path")]

TOKENS, HEADS, KV_HEADS, HEAD_DIM, SCALE = 90, 6, 2, 48, 0.2


def inputs(*rows):
    generator = np.random.default_rng(0)
    shapes = [(HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (HEADS, HEAD_DIM)]
    return [jnp.asarray(generator.normal(size=(*rows, TOKENS, *shape)), jnp.float32) for shape in shapes]


def ranges(*lengths, window=TOKENS):
    """Of sequences one after the other, then padding, which sees itself."""
    first, last, start = np.arange(TOKENS), np.arange(TOKENS), 0
    for length in lengths:
        place = np.arange(length)
        first[start : start + length] = start + np.maximum(0, place - window + 1)
        start += length
    return jnp.asarray(first, jnp.int32), jnp.asarray(last, jnp.int32)


def definition(q, k, v, first, last):
    keys, values = (jnp.repeat(each, HEADS // KV_HEADS, axis=1) for each in (k, v))
    token = jnp.arange(TOKENS)
    seen = (token >= first[:, None]) & (token <= last[:, None])
    weights = jax.nn.softmax(jnp.where(seen, jnp.einsum("thd,shd->hts", q, keys) * SCALE, -jnp.inf), axis=-1)
    return jnp.einsum("hts,shd->thd", weights, values)


def derivatives(function, *operands):
    """The output and the derivatives of (q, k, v, cotangent, first, last), in one program."""

    @jax.jit
    def run(q, k, v, cotangent, *seen):
        out, pull_back = jax.vjp(lambda *operands: function(*operands, *seen), q, k, v)
        return out, *pull_back(cotangent)

    return run(*operands)


attention = functools.partial(sequence_attention, scale=SCALE)


@pytest.mark.parametrize(
    "seen", [ranges(90), ranges(7, 1, 60), ranges(50, 40, window=11)], ids=["one", "packed", "window"]
)
def test_output_and_derivatives_are_the_definitions(seen):
    found, expected = (derivatives(function, *inputs(), *seen) for function in (attention, definition))
    for each, of_definition in zip(found, expected, strict=True):
        np.testing.assert_allclose(each, of_definition, rtol=1e-5, atol=1e-5)


def test_mapped_rows_see_their_own_tokens_alone():
    rows = inputs(3)
    first, last = (jnp.stack(each) for each in zip(ranges(90), ranges(7, 1, 60), ranges(40, 50), strict=True))
    found = jax.vmap(functools.partial(derivatives, attention))(*rows, first, last)
    expected = jax.vmap(functools.partial(derivatives, definition))(*rows, first, last)
    for each, of_definition in zip(found, expected, strict=True):
        np.testing.assert_allclose(each, of_definition, rtol=1e-5, atol=1e-5)


def test_what_rows_share_is_not_mapped():
    q, k, v, cotangent = inputs(2)
    seen = ranges(30, 60)
    in_axes = (0, None, 0, 0, None, None)
    found, expected = (
        jax.vmap(functools.partial(derivatives, function), in_axes)(q, k[0], v, cotangent, *seen)
        for function in (attention, definition)
    )
    for each, of_definition in zip(found, expected, strict=True):
        np.testing.assert_allclose(each, of_definition, rtol=1e-5, atol=1e-5)


def test_derivatives_of_what_is_computed_again_are_the_same():
    q, k, v, cotangent = inputs(2)
    seen = ranges(30, 60)

    def of_rows(function):
        return jax.jit(jax.vmap(functools.partial(derivatives, function), (0, 0, 0, 0, None, None), axis_name="rows"))

    expected = of_rows(attention)(q, k, v, cotangent, *seen)
    mapped = jax.vmap(attention, (0, 0, 0, None, None), axis_name="rows")
    found = derivatives(functools.partial(recomputed, mapped), q, k, v, cotangent, *seen)
    # A function of its own: what was traced for another path is not taken again.
    checkpointed = of_rows(jax.checkpoint(functools.partial(sequence_attention, scale=SCALE)))(
        q, k, v, cotangent, *seen
    )
    for each, again, first in zip(found, checkpointed, expected, strict=True):
        np.testing.assert_allclose(each, first, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(again, first, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "head_dim"), [(jnp.bfloat16, 48), (jnp.float32, 20)])
def test_derivatives_have_the_types_and_any_sizes_of_heads(dtype, head_dim):
    operands = [each[..., :head_dim].astype(dtype) for each in inputs()]
    found = derivatives(attention, *operands, *ranges(90))
    expected = derivatives(definition, *(each.astype(jnp.float32) for each in operands), *ranges(90))
    tolerance = 1e-5 if dtype == jnp.float32 else 0.05
    for each, of_definition in zip(found, expected, strict=True):
        assert each.dtype == dtype
        np.testing.assert_allclose(each.astype(jnp.float32), of_definition, rtol=tolerance, atol=tolerance)
