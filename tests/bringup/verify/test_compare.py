"""Figures of a comparison against what they are by definition."""

import numpy as np
import pytest
import torch

from jaxis.bringup.verify.compare import GATES, compare_logits, kl_divergence, relative_error


def logits(rows=70, vocab=37, seed=0):
    return np.random.default_rng(seed).normal(0, 3, (rows, vocab)).astype(np.float32)


def test_kl_divergence_is_that_of_torch():
    actual, expected = logits(seed=1), logits(seed=2)
    wanted = torch.nn.functional.kl_div(
        torch.log_softmax(torch.tensor(actual, dtype=torch.float64), -1),
        torch.log_softmax(torch.tensor(expected, dtype=torch.float64), -1),
        reduction="none",
        log_target=True,
    ).sum(-1)
    np.testing.assert_allclose(kl_divergence(actual, expected), wanted.numpy(), rtol=1e-10)


def test_kl_divergence_does_not_see_a_shift_of_a_whole_row():
    expected = logits()
    assert kl_divergence(expected + 5.0, expected).max() < 1e-10


def test_figures_of_logits_that_differ_in_one_place():
    expected = np.tile(np.arange(20, dtype=np.float32), (4, 1))
    actual = expected.copy()
    actual[1, 0] = 30.0  # the least likely token of one of four rows becomes the most likely
    found = compare_logits(actual, expected)
    assert found.num_tokens == 4
    assert found.max_abs_difference == 30.0
    assert found.relative_error == pytest.approx(30 / 19)
    assert found.argmax_agreement == 0.75
    assert found.top_k_overlap == pytest.approx((3 * 10 + 9) / 40)
    assert found.max_kl_nats == pytest.approx(4 * found.mean_kl_nats)


@pytest.mark.parametrize("spoiled", ["shape", "nan", "inf"])
def test_logits_that_cannot_be_compared_never_pass(spoiled):
    expected = logits()
    actual = expected[:, :-1] if spoiled == "shape" else np.where(expected == expected[3, 3], float(spoiled), expected)
    assert not compare_logits(actual, expected).passes(GATES["bfloat16"])


def test_gates():
    expected = logits()
    exact, wide = (compare_logits(expected + e * np.abs(expected).max(), expected) for e in (1e-7, 1e-3))
    noisy = compare_logits(expected + np.random.default_rng(3).normal(0, 0.02, expected.shape), expected)
    assert exact.passes(GATES["float32"])
    assert not wide.passes(GATES["float32"])  # the same distribution, from logits that are not the same
    assert not noisy.passes(GATES["float32"])
    assert noisy.passes(GATES["bfloat16"])
    assert not compare_logits(logits(seed=1), expected).passes(GATES["bfloat16"])


def test_relative_error_of_the_closest_tokens():
    expected = np.full((10, 4), 2.0, np.float32)
    actual = expected.copy()
    actual[7] += 1.0
    actual[2, 1] -= 0.5
    assert relative_error(actual, expected) == 0.5
    assert relative_error(actual, expected, tokens=0.9) == 0.25
    assert relative_error(actual, expected, tokens=0.8) == 0.0


def test_relative_error_of_zeros():
    zeros = np.zeros((2, 2), np.float32)
    assert relative_error(zeros, zeros) == 0.0
    assert relative_error(zeros + 1e-9, zeros) == float("inf")
