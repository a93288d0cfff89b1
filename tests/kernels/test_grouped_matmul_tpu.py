"""The grouped product on TPU, interpreted on CPU with races looked for, against numpy in float64."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from jaxis.kernels.grouped_matmul import tpu
from jaxis.kernels.weights import QuantizedWeight, as_weight
from tests.support.weight_stacks import KINDS, grouped_product, weight_stack

# Of 150 rows, which take two tiles: groups without rows, one in both tiles, one that shares the second, rows past all.
GROUP_SIZES = (7, 0, 126, 13, 0)
OFTEN = ("int4 with minima", "MXFP4")
kinds = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in OFTEN else pytest.mark.slow) for kind in KINDS]
)


@pytest.fixture
def strict():
    yield pltpu.InterpretParams(detect_races=True, vector_clock_size=64)
    races = interpret_pallas_call.races
    pltpu.reset_tpu_interpret_mode_state()
    assert races is None or not races.races_found


def product(x, weight, group_sizes, interpret):
    stack = as_weight(weight).kernel_stack()
    assert tpu.supports(x, stack)
    y = tpu.grouped_matmul(x, stack, jnp.asarray(group_sizes, jnp.int32), interpret=interpret)
    assert y.dtype == x.dtype
    return np.asarray(y, np.float64)


def random(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.sampled(6)
@kinds
def test_each_row_is_multiplied_by_its_groups_weight(kind, strict):
    columns = 512 if "256" in kind else 384 if "128" in kind or "blocks" in kind else 352
    x, (weight, expected) = random(150, columns), weight_stack(kind, 5, 160, columns)
    y = product(jnp.asarray(x), weight, GROUP_SIZES, strict)
    exact = grouped_product(x, expected, GROUP_SIZES)
    np.testing.assert_allclose(y, exact, rtol=0, atol=1e-5 * np.abs(exact).max())


def test_weights_of_groups_without_rows_are_not_read(strict):
    weight = random(3, 24, 128)
    weight[[0, 2]] = np.nan
    assert np.isfinite(product(jnp.asarray(random(5, 128)), jnp.asarray(weight), (0, 4, 0), strict)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_summed_in_the_same_chunks_regardless_of_the_batch(kind):
    stack = as_weight(weight_stack(kind, 2, 160, 512)[0]).kernel_stack()
    plans = [tpu._plan(jnp.zeros((rows, 512), jnp.bfloat16), stack) for rows in (1, 8, 100, 5000)]
    assert len({(plan.chunk, plan.outputs) for plan in plans}) == 1


def test_what_the_kernel_does_not_take():
    stack = as_weight(weight_stack("float32", 2, 16, 128)[0]).kernel_stack()
    assert not tpu.supports(jnp.zeros((4, 128), jnp.float16), stack)
    groups_of_48 = QuantizedWeight(jnp.zeros((2, 16, 96), jnp.int8), jnp.ones((2, 16, 2)))
    assert not tpu.supports(jnp.zeros((4, 96)), as_weight(groups_of_48).kernel_stack())
