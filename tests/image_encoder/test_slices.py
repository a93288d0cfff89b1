"""A program in slices computes what the program does, each slice of bounded work."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxis.image_encoder.slices import _flops, cut
from jaxis.kernels import native
from jaxis.layers.linear import JaxLinear
from jaxis.models.common.towers.attention import attend_within
from jaxis.quantization.arguments import parse_quantization
from jaxis.quantization.wrappers import PackingConfig

ROWS, FEATURES = 256, 32


@jax.jit
def layer(x, weight, count):
    def attend(rows):
        scores = jnp.where(jnp.arange(ROWS) < count, rows @ x.T, -jnp.inf)
        return jax.nn.softmax(scores, axis=-1) @ x, rows.sum()

    attended, _ = jax.lax.map(attend, x.reshape(4, -1, FEATURES))
    return x + jnp.tanh(attended.reshape(ROWS, FEATURES) @ weight) @ weight.T


def tower(first, second, x, count):
    scaled = (x - jnp.asarray(np.linspace(0, 1, FEATURES), jnp.float32)) * 2
    for weight in (first, second):
        scaled = layer(scaled, weight, count)
    return scaled[:64] + 1


@pytest.mark.sampled
@pytest.mark.parametrize("max_flops", [4e6, 1e12, 6e5])
def test_slices_compute_what_the_program_does(max_flops):
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=(FEATURES, 4 * FEATURES)).astype(np.float32) / 8 for _ in range(2)]
    operands = [*weights, rng.normal(size=(ROWS, FEATURES)).astype(np.float32), np.int32(200)]
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    structs = [jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=sharding) for each in operands]
    sliced = cut(tower, structs, max_flops, sharding)
    values = sliced.constants | dict(zip(sliced.inputs, operands, strict=True))
    for part in sliced.slices:
        arguments = [values[value] for value in part.inputs]
        of_slice = jax.make_jaxpr(part.program.function)(*arguments)
        large = [eqn for eqn in of_slice.jaxpr.eqns if eqn.primitive.name in ("dot_general", "scan")]
        # The smallest pieces are 64 rows of a product, and one pass of a map.
        assert sum(map(_flops, of_slice.jaxpr.eqns)) < 1.2 * max_flops or len(large) <= 1
        values |= zip(part.outputs, jax.jit(part.program.function)(*arguments), strict=True)
        for value in part.last_used:
            del values[value]
    np.testing.assert_allclose(values[sliced.output], tower(*operands), rtol=1e-6, atol=1e-6)
    # Of the intermediate values none is left, and equal layers share programs.
    assert set(values) == {*sliced.inputs, *sliced.constants, sliced.output}
    assert len(sliced.slices) == 1 if max_flops == 1e12 else len(sliced.programs) <= len(sliced.slices) // 2 + 3


@pytest.mark.sampled
@pytest.mark.skipif(not native.usable(), reason="only native kernels pack weights")
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_kernels_are_cut_as_what_they_compute(quantization):
    """Products of packed weights, and attention, of which JAX does not say what they cost."""
    layer = JaxLinear(256, 768, nnx.Rngs(0), quant_config=PackingConfig(parse_quantization(quantization)))
    layer.quant_method.process_weights_after_loading(layer)
    rows, segments = 1024, jnp.where(jnp.arange(1024) < 1000, 0, -1)

    def attended(x):
        return attend_within(segments, *jnp.split(layer(x).reshape(rows, 48, 16), 3, axis=1))

    x = np.random.default_rng(0).normal(size=(rows, 256)).astype(np.float32)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    product, attention = 2 * rows * 256 * 768, 4 * rows * rows * 256
    sliced = cut(attended, [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)], product / 3, sharding)
    values, costs = sliced.constants | {sliced.inputs[0]: x}, []
    for part in sliced.slices:
        arguments = [values[value] for value in part.inputs]
        costs.append(sum(map(_flops, jax.make_jaxpr(part.program.function)(*arguments).jaxpr.eqns)))
        values |= zip(part.outputs, jax.jit(part.program.function)(*arguments), strict=True)
    assert sum(costs) > product + attention
    # A chunk of queries is the smallest piece of attention.
    assert max(costs) < 1.2 * max(product / 3, attention / 4)
    assert sum(cost < product / 2 for cost in costs) >= 4
    np.testing.assert_array_equal(values[sliced.output], jax.jit(attended)(x))
