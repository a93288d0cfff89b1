"""Products with another pair of thin matrices for each row, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxis.kernels import native
from jaxis.kernels.low_rank import LowRankStack, low_rank

pytestmark = pytest.mark.parametrize("is_native", [True, False])


@pytest.fixture(autouse=True)
def implementation(is_native, monkeypatch):
    if not is_native:
        monkeypatch.setattr("jaxis.kernels.native.library", lambda: None)
    elif not native.usable():
        pytest.skip("needs the native kernels")


def stack(rng, num_slots, rank, k, n, dtype=jnp.float32):
    a, b = rng.standard_normal((num_slots, rank, k)), rng.standard_normal((num_slots, rank, n))
    ranks = rng.integers(0, rank + 1, num_slots)
    ranks[0] = rank
    return LowRankStack(jnp.asarray(a, dtype), jnp.asarray(b, dtype), jnp.asarray(ranks, jnp.int32))


def expected(x, slots, pairs):
    out = np.zeros((len(x), pairs.b.shape[2]))
    for row, slot in enumerate(slots):
        if slot:
            a, b = (np.asarray(each, np.float64)[slot - 1, : int(pairs.ranks[slot - 1])] for each in pairs[:2])
            out[row] = b.T @ (a @ x[row])
    return out


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("rows", "k", "num_slots"), [(1, 5, 3), (7, 48, 1), (40, 129, 3)])
def test_each_row_is_multiplied_by_the_matrices_of_its_slot(rows, k, num_slots, dtype):
    rng = np.random.default_rng(rows)
    # More than one call of a kernel takes.
    pairs = [stack(rng, num_slots, 6, k, n, dtype) for n in (1, 70, 128, 16, 3)]
    x, slots = rng.standard_normal((rows, k)).astype(np.float32), rng.integers(0, num_slots + 1, rows, np.int32)
    run = jax.jit(lambda *operands: low_rank(*operands))  # of its own: what another implementation traced is not taken
    for y, each in zip(run(x, slots, pairs), pairs, strict=True):
        wanted = expected(x.astype(np.float64), slots, each)
        np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-4 * max(1.0, np.abs(wanted).max()))
        _, derive = jax.vjp(jax.jit(lambda x, each=each: low_rank(x, slots, [each])[0]), x)
        wanted = expected(np.asarray(y, np.float64), slots, LowRankStack(each.b, each.a, each.ranks))
        np.testing.assert_allclose(derive(y)[0], wanted, rtol=1e-5, atol=1e-4 * max(1.0, np.abs(wanted).max()))


def test_rows_without_a_slot_are_zeros_and_read_nothing(is_native):
    nothing = LowRankStack(jnp.full((1, 4, 8), jnp.nan), jnp.full((1, 4, 8), jnp.nan), jnp.zeros(1, jnp.int32))
    [y] = low_rank(jnp.ones((3, 8)), jnp.zeros(3, jnp.int32), [nothing])
    assert not np.asarray(y).any()
    if is_native:  # of a slot, only its rank
        [y] = low_rank(jnp.ones((3, 8)), jnp.ones(3, jnp.int32), [nothing])
        assert not np.asarray(y).any()


def test_a_row_has_the_same_bits_in_any_batch(is_native):
    if not is_native:
        pytest.skip("only the native kernels promise it")
    rng = np.random.default_rng(0)
    pairs = [stack(rng, 4, 16, 200, 96)]
    x, slots = rng.standard_normal((64, 200)).astype(np.float32), rng.integers(0, 5, 64).astype(np.int32)
    [together] = low_rank(jnp.asarray(x), jnp.asarray(slots), pairs)
    for row in range(0, 64, 9):
        [alone] = low_rank(jnp.asarray(x[row : row + 1]), jnp.asarray(slots[row : row + 1]), pairs)
        assert np.asarray(alone).tobytes() == np.asarray(together[row]).tobytes()
