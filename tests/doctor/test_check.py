"""Checks: what passes, what fails, and that whatever is raised becomes one line."""

import numpy as np
import pytest

from jaxis.doctor.check import Case, CheckFailed, compare, run_case


def test_an_error_within_the_tolerance_passes_and_is_stated():
    expected = np.array([1.0, -4.0])
    assert compare(expected + np.array([0.004, 0]), expected, 1e-2).startswith("relative error 1.0e-03")


@pytest.mark.parametrize(
    ("actual", "message"),
    [
        ([1.0, -4.5], "relative error 1.2e-01, more than 1e-02"),
        ([1.0, np.nan], "1 of 2 values are not finite"),
        ([1.0], r"has shape \(1,\) instead of \(2,\)"),
    ],
)
def test_what_is_wrong_fails(actual, message):
    with pytest.raises(CheckFailed, match=message):
        compare(actual, np.array([1.0, -4.0]), 1e-2)


@pytest.mark.parametrize(
    ("error", "detail"),
    [(CheckFailed("is off\nby one"), "is off by one"), (RuntimeError("no kernel"), "RuntimeError: no kernel")],
)
def test_whatever_is_raised_is_one_line_of_a_failed_check(error, detail):
    def run():
        raise error

    check = run_case(Case("kernels", "it", run))
    assert (check.passed, check.detail) == (False, detail)
    assert run_case(Case("kernels", "it", lambda: "found")).passed
