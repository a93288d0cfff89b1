"""The sampling kernels against numpy, lax.top_k and transformers' logits warpers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from scipy.special import logsumexp as scipy_logsumexp
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from jaxis.kernels import native
from jaxis.kernels.sampling import TokenFilters, argmax, cpu, logsumexp, mask_tokens, token_ranks, top_tokens
from jaxis.kernels.sampling.bisection import largest_value_reaching
from jaxis.kernels.sampling.filters import weigh_tokens
from tests.support.kernel_paths import PLAIN, each_path, path  # noqa: F401

pytestmark = [each_path, pytest.mark.usefixtures("path")]

# Under one tile; a part of the last tile; more tiles than are sorted.
VOCAB_SIZES = (11, 1000, 20001)


def random_logits(rows, vocab_size, *, spread=3.0, seed=0):
    return np.random.default_rng(seed).normal(size=(rows, vocab_size)).astype(np.float32) * spread


def run(kernel, *operands):
    """What the kernel gives on the path at hand, compiled as a whole: each of its operations alone takes as long."""
    return jax.jit(lambda *operands: kernel(*operands))(*operands)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_argmax_is_the_first_of_equals(vocab_size):
    logits = np.round(random_logits(8, vocab_size)) + 0.0  # no negative zeros
    token_ids, maxima = run(argmax, jax.device_put(logits))
    assert (np.sort(logits)[:, -2:].std(axis=1) == 0).any() or vocab_size == 11
    np.testing.assert_array_equal(token_ids, logits.argmax(-1))
    np.testing.assert_array_equal(maxima, logits.max(-1))


def test_argmax_of_equal_banned_or_far_apart_logits():
    logits = np.full((4, 20001), -np.inf, np.float32)
    logits[1] = -0.0
    logits[1, 3] = 0.0
    logits[2, [9000, 20000]] = -3e38
    logits[3, 20000] = np.inf
    token_ids, maxima = run(argmax, jax.device_put(logits))
    np.testing.assert_array_equal(token_ids, [0, 0, 9000, 20000])
    np.testing.assert_array_equal(maxima, [-np.inf, 0.0, np.float32(-3e38), np.inf])


def test_argmax_of_a_row_with_a_nan_is_nan():
    logits = random_logits(2, 1000)
    logits[1, 700] = np.nan
    assert np.isfinite(run(argmax, jax.device_put(logits))[1]).tolist() == [True, False]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("k", [0, 1, 20])
def test_top_tokens_equal_a_stable_sort_also_among_ties(vocab_size, k):
    logits = np.round(random_logits(8, vocab_size)) + 0.0  # no negative zeros
    values, token_ids = run(functools.partial(top_tokens, k=k), jax.device_put(logits))
    expected = np.argsort(-logits, axis=-1, kind="stable")[:, :k]
    np.testing.assert_array_equal(token_ids, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(logits, expected, -1))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_logsumexp_equals_float64(vocab_size):
    logits = random_logits(4, vocab_size) + np.float32([[0], [80], [-500], [1000]])
    np.testing.assert_allclose(
        run(logsumexp, jax.device_put(logits)), scipy_logsumexp(logits.astype(np.float64), axis=-1), 1e-6
    )


def test_bisection_selects_the_kth_largest_value_of_any_sign():
    values = np.concatenate([random_logits(1, 500), np.zeros((1, 5)), [[-0.0, 1e-42, -1e-42, -np.inf, 3e38]]], axis=1)
    values = np.repeat(values.astype(np.float32), 7, axis=0)
    k = np.array([1, 2, 200, 250, 255, 509, 0], np.int32)
    found = largest_value_reaching(jax.device_put(values), 1, *jax.device_put((k, values.max(-1))))
    expected = np.append(-np.sort(-values[0])[k[:-1] - 1], -np.inf)
    np.testing.assert_allclose(found, expected, atol=1.2e-38)  # subnormals may count as 0


FILTERS = [  # top_k, top_p, min_p, temperature
    (1, 1.0, 0.0, 1.0),
    (50, 1.0, 0.0, 0.7),
    (500, 1.0, 0.0, 1.0),
    (0, 0.5, 0.0, 0.2),
    (0, 0.9, 0.0, 1.0),
    (0, 0.99, 0.0, 3.0),
    (0, 1e-6, 0.0, 1.0),
    (0, 1.0, 0.05, 1.0),
    (0, 1.0, 1.0, 1.0),
    (0, 1.0, 1e-5, 2.0),
    (40, 0.8, 0.02, 1.3),
    (300, 0.95, 0.001, 2.0),
    (400, 1.0, 0.5, 2.0),
    (0, 0.98, 1e-4, 4.0),
    (60, 0.9, 1e-6, 4.0),
    (0, 1.0, 0.0, 1.0),
]


def kept_by_transformers(logits, top_k, top_p, min_p, temperature):
    """In vLLM's order: temperature, min-p, top-k, top-p. In float64, so that sums do not decide."""
    scores = TemperatureLogitsWarper(temperature)(None, torch.from_numpy(logits).double())
    if min_p > 0:
        scores = MinPLogitsWarper(min_p)(None, scores)
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    return torch.isfinite(scores).numpy()


def find_cutoffs(logits, temperature, filters):
    weigh = cpu.weigh_tokens if cpu.supports(logits) else weigh_tokens
    weights = weigh(logits, 1 / temperature, filters)
    return weights.cutoff, weights.tile_mass


@functools.cache
def jitted_for(library):
    return jax.jit(lambda *args: find_cutoffs(*args))


def cutoffs(*args):
    return jitted_for(native.library())(*args)


def filter_rows(vocab_size):
    """FILTERS as arrays: temperature, filters."""
    top_k, top_p, min_p, temperature = map(np.array, zip(*FILTERS, strict=True))
    top_k = np.where(top_k == 0, vocab_size, np.minimum(top_k, vocab_size))
    return jnp.float32(temperature), TokenFilters(jnp.asarray(top_k), jnp.float32(top_p), jnp.float32(min_p))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("spread", [pytest.param(0.1, marks=pytest.mark.slow), 3.0])
def test_filters_keep_what_transformers_warpers_keep(vocab_size, spread):
    logits = random_logits(len(FILTERS), vocab_size, spread=spread, seed=1)
    cutoff, tile_mass = cutoffs(jax.device_put(logits), *filter_rows(vocab_size))
    for i, row in enumerate(FILTERS):
        expected = kept_by_transformers(logits[i : i + 1], *row)[0]
        np.testing.assert_array_equal(logits[i] >= cutoff[i], expected, err_msg=str(row))
        weights = np.where(expected, np.exp((logits[i] - logits[i].max()) / np.float64(row[3])), 0)
        weights = np.pad(weights, (0, -vocab_size % 128)).reshape(-1, 128).sum(-1)
        np.testing.assert_allclose(tile_mass[i], weights, rtol=2e-5, atol=1e-30)


@pytest.mark.sampled(3)
def test_searching_all_rows_at_once_finds_the_same_as_row_by_row(monkeypatch):
    logits = jnp.asarray(random_logits(len(FILTERS), 20001, seed=2))
    row_by_row = cutoffs(logits, *filter_rows(20001))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    at_once = jax.jit(lambda *args: find_cutoffs(*args))(logits, *filter_rows(20001))
    np.testing.assert_array_equal(row_by_row[0], at_once[0])
    np.testing.assert_allclose(row_by_row[1], at_once[1], rtol=1e-5)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_a_row_weighs_the_same_to_the_bit_alone_and_among_others(vocab_size, path):  # noqa: F811
    if path == PLAIN:
        pytest.skip("XLA does not promise it")
    logits = jnp.asarray(random_logits(len(FILTERS), vocab_size, seed=4))
    temperature, filters = filter_rows(vocab_size)
    together = cutoffs(logits, temperature, filters)
    together_logsumexp = run(logsumexp, logits)
    for i in (0, 3, 10, 15):
        row = slice(i, i + 1)
        alone = cutoffs(logits[row], temperature[row], TokenFilters(*(field[row] for field in filters)))
        for one, many in zip(alone, together, strict=True):
            np.testing.assert_array_equal(one, many[row])
        np.testing.assert_array_equal(run(logsumexp, logits[row]), together_logsumexp[row])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
@pytest.mark.parametrize("temperature", [1e-5, 0.3, 100.0, 1e30])
def test_top_p_at_extreme_temperatures_keeps_the_smallest_set_with_that_mass(top_p, temperature):
    logits = random_logits(1, 20001, seed=5)
    filters = TokenFilters(jnp.array([20001]), jnp.array([top_p]), jnp.zeros(1))
    cutoff, _ = cutoffs(jax.device_put(logits), jnp.float32([temperature]), filters)
    order = np.sort(logits[0].astype(np.float64))[::-1]
    probability = np.exp((order - order[0]) / temperature)
    cumulative = np.cumsum(probability / probability.sum())
    kept = int((logits[0] >= cutoff[0]).sum())
    # Which token reaches the target may be a matter of rounding: masses are multiples of 2**-30.
    lowest, highest = np.searchsorted(cumulative, [top_p * (1 - 2e-5), top_p * (1 + 2e-5)])
    assert lowest + 1 <= kept <= highest + 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weighing_logits_that_are_no_numbers_leaves_the_other_rows_alone(bad):
    logits = random_logits(3, 1000)
    filters = TokenFilters(jnp.full(3, 40), jnp.full(3, 0.9), jnp.full(3, 0.01))
    expected = cutoffs(jax.device_put(logits), jnp.ones(3), filters)
    logits[1, [3, 500, 501, 999]] = bad
    found = cutoffs(jax.device_put(logits), jnp.ones(3), filters)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours[::2], theirs[::2])


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_ranks_count_the_tokens_above(vocab_size):
    logits = np.round(random_logits(4, vocab_size))
    chosen = logits[:, 7]
    np.testing.assert_array_equal(
        run(token_ranks, jax.device_put(logits), jax.device_put(chosen)), 1 + (logits > chosen[:, None]).sum(-1)
    )


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_masks_ban_the_tokens_whose_bit_is_zero(vocab_size):
    logits = random_logits(3, vocab_size)
    permitted = np.random.default_rng(1).random((3, vocab_size)) < 0.3
    permitted[2] = True
    bits = np.pad(permitted, ((0, 0), (0, -vocab_size % 32)), constant_values=True)
    words = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    masked = run(mask_tokens, jax.device_put(logits), jax.device_put(words))
    np.testing.assert_array_equal(masked, np.where(permitted, logits, -np.inf))


def test_tokens_as_likely_as_the_last_one_kept_are_kept():
    logits = jnp.zeros((2, 300)).at[:, 7].set(1.0)
    filters = TokenFilters(jnp.array([2, 300]), jnp.array([1.0, 0.5]), jnp.zeros(2))
    cutoff, _ = cutoffs(logits, jnp.ones(2), filters)
    np.testing.assert_array_equal(cutoff, [0.0, 0.0])


def test_top_k_over_banned_tokens_keeps_those_not_banned():
    logits = jnp.full((1, 20001), -jnp.inf).at[0, jnp.array([5, 900, 20000])].set(jnp.array([1.0, 2.0, 3.0]))
    _, tile_mass = cutoffs(logits, jnp.ones(1), TokenFilters(jnp.array([40]), jnp.ones(1), jnp.zeros(1)))
    np.testing.assert_allclose(tile_mass[0, [0, 7, 156]], np.exp([-2.0, -1.0, 0.0]), 1e-6)
    assert np.count_nonzero(tile_mass) == 3
