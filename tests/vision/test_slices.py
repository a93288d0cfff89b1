"""A program in slices computes what the program does, each slice of bounded work."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxis.vision.slices import _flops, cut

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


@pytest.mark.parametrize("max_flops", [1e12, 4e6, 6e5])
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
