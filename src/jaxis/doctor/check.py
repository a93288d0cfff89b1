"""One check of `jaxis doctor`: the action, and its result."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Check:
    """The result of a check of "devices", "kernels", "model" or "speed"; `detail` is a finding or error in one line."""

    area: str
    name: str
    passed: bool
    detail: str
    seconds: float


@dataclass(frozen=True)
class Case:
    """A check to run: `run` returns the finding.

    `run` raises CheckFailed if something is wrong, and may raise any other error.
    """

    area: str
    name: str
    run: Callable[[], str]


class CheckFailed(Exception):
    """A check found something wrong; the message is one line."""


def run_case(case: Case) -> Check:
    """Runs a check; any error that it raises is its finding."""
    start = time.perf_counter()
    try:
        passed, detail = True, case.run()
    except CheckFailed as error:
        passed, detail = False, str(error)
    except Exception as error:  # a compiler's errors are of any type
        passed, detail = False, f"{type(error).__name__}: {error}"
    detail = " ".join(detail.split())
    return Check(case.area, case.name, passed, detail[:_LONGEST_DETAIL], time.perf_counter() - start)


_LONGEST_DETAIL = 500


def compare(actual: object, expected: np.ndarray, tolerance: float) -> str:
    """Returns the largest error relative to the largest expected value.

    Raises CheckFailed if the error is above the tolerance, or a value is not finite.
    """
    found = np.asarray(actual, np.float64)
    if found.shape != expected.shape:
        raise CheckFailed(f"has shape {found.shape} instead of {expected.shape}")
    if not np.isfinite(found).all():
        raise CheckFailed(f"{np.count_nonzero(~np.isfinite(found))} of {found.size} values are not finite")
    error = float(np.abs(found - expected).max() / np.abs(expected).max())
    if error > tolerance:
        raise CheckFailed(f"relative error {error:.1e}, more than {tolerance:.0e}")
    return f"relative error {error:.1e}, at most {tolerance:.0e} allowed"
