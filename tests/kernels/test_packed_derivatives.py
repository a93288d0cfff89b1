"""Products with packed weights have the derivatives of their definitions, also with respect to what was packed."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxis.kernels import native
from jaxis.kernels.activations import KERNEL_NAMES
from jaxis.kernels.weights import ExpertStacks, experts, fused_matmul, gated_matmul, head_matmul, lookup, matmul, pack
from jaxis.kernels.weights.stack_packer import pack_stack
from jaxis.layers.glu import GLU, ClampedGLU

pytestmark = pytest.mark.skipif(not native.usable(), reason="needs the native kernels")

NUM_TOKENS, SIZE, NUM_EXPERTS, PER_TOKEN = 9, 48, 5, 2


def draw(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def check(function, definition, x, *masters, dtype):
    """Values, and derivatives of a sum with drawn weights; the definition has floats in the place of packed weights."""
    rounded = [np.asarray(master).astype(dtype) for master in masters]
    packed = [(pack_stack if each.ndim == 3 else pack)(each) for each in rounded]

    def through_packed(x, *masters):
        return function(x, *(dataclasses.replace(w, master=m) for w, m in zip(packed, masters, strict=True)))

    def differentiated(function, *operands):
        def total(*operands):
            y = function(*operands)
            return jnp.sum(y * draw(7, *y.shape)), y

        differentiate = jax.value_and_grad(total, argnums=tuple(range(len(operands))), has_aux=True)
        (_, y), derivatives = jax.jit(differentiate)(*operands)
        return y, *derivatives

    found = differentiated(through_packed, x, *masters)
    expected = differentiated(definition, x, *(jnp.asarray(each, jnp.float32) for each in rounded))
    for each, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(each, other, atol=1e-5 * np.abs(other).max(), rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_products(dtype):
    x, gate, up = draw(0, NUM_TOKENS, SIZE), draw(1, 40, SIZE), draw(2, 40, SIZE)
    check(matmul, lambda x, w: x @ w.T, x, gate, dtype=dtype)
    for activation in KERNEL_NAMES:
        check(
            functools.partial(gated_matmul, activation=activation),
            lambda x, gate, up, activation=activation: activation(x @ gate.T) * (x @ up.T),
            *(x, gate, up),
            dtype=dtype,
        )
    check(
        lambda x, *weights: jnp.concatenate(fused_matmul(x, weights), -1),
        lambda x, *weights: jnp.concatenate([x @ w.T for w in weights], -1),
        *(x, gate, up),
        dtype=dtype,
    )
    check(
        head_matmul,
        lambda x, w: jnp.einsum("thi,hoi->tho", x, w),
        *(draw(3, NUM_TOKENS, 3, SIZE), draw(4, 3, 40, SIZE)),
        dtype=dtype,
    )
    ids = jnp.asarray([3, 0, 3, 39])
    check(lambda x, w: x * lookup(ids, w, jnp.float32), lambda x, w: x * w[ids], draw(5, 4, 1), gate, dtype=dtype)


@pytest.mark.parametrize("num_rows", [8192 + 40, 2 * 8192])
def test_the_derivative_of_a_product_with_a_frozen_vocabulary(num_rows):
    x, weight, dy = draw(0, NUM_TOKENS, SIZE), np.asarray(draw(1, num_rows, SIZE)), draw(2, NUM_TOKENS, num_rows)
    packed = pack(weight)
    [found] = jax.jit(lambda x: jax.vjp(lambda x: matmul(x, packed), x)[1](dy))(x)
    expected = np.asarray(dy, np.float64) @ weight
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)


@pytest.mark.parametrize("activation", KERNEL_NAMES)
def test_a_gated_product_has_the_same_bits_where_it_is_differentiated(activation):
    x, gate, up = draw(0, NUM_TOKENS, SIZE), *(pack(np.asarray(draw(seed, 40, SIZE))) for seed in (1, 2))
    addends = [draw(seed, NUM_TOKENS, 40) for seed in (3, 4)]

    def product(x):
        return gated_matmul(x, gate, up, activation, addends)

    np.testing.assert_array_equal(jax.jit(lambda x: jax.vjp(product, x)[0])(x), jax.jit(product)(x))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("unit", "scales_input", "dtype"),
    [(GLU(jax.nn.silu), True, np.float32), (ClampedGLU(1.0), False, ml_dtypes.bfloat16)],
)
def test_experts(unit, scales_input, dtype):
    """An expert without tokens has no derivative, and neither has what a slot past the last expert would weigh."""
    ids = np.random.default_rng(0).integers(0, NUM_EXPERTS - 1, (NUM_TOKENS, PER_TOKEN))
    ids[0, 1] = NUM_EXPERTS
    expert_ids = jnp.asarray(ids)
    slot_weights = jax.nn.softmax(draw(4, NUM_TOKENS, PER_TOKEN))
    gate_bias, up_bias, down_bias = draw(5, NUM_EXPERTS, 40), draw(6, NUM_EXPERTS, 40), draw(7, NUM_EXPERTS, SIZE)

    # The last column of x multiplies the weights of slots.
    def by_kernel(x, *stacks):
        gathered = ExpertStacks(*stacks, gate_bias, up_bias, down_bias, NUM_EXPERTS, unit, scales_input)
        return experts(x[:, :SIZE], expert_ids, slot_weights * x[:, SIZE:], gathered)

    def by_slots(x, gate, up, down):
        weights = (slot_weights * x[:, SIZE:])[..., None]
        rows = x[:, None, :SIZE] * (weights if scales_input else 1)
        hidden = unit(
            jnp.einsum("tki,tkoi->tko", rows, gate[ids]) + gate_bias[ids],
            jnp.einsum("tki,tkoi->tko", rows, up[ids]) + up_bias[ids],
        )
        outputs = jnp.einsum("tki,tkoi->tko", hidden, down[ids]) + down_bias[ids]
        is_expert = (ids < NUM_EXPERTS)[..., None]
        return jnp.where(is_expert, outputs * (1 if scales_input else weights), 0).sum(1)

    stacks = draw(1, NUM_EXPERTS, 40, SIZE), draw(2, NUM_EXPERTS, 40, SIZE), draw(3, NUM_EXPERTS, SIZE, 40)
    check(by_kernel, by_slots, draw(0, NUM_TOKENS, SIZE + 1), *stacks, dtype=dtype)
