"""One check of `jaxis doctor`: what was done, and whether it came out as it should."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Check:
    """The result of a check.

    Attributes:
      area: "devices", "kernels", "model" or "speed".
      name: What was checked.
      passed: Whether it is as it should be.
      detail: What was found, or the error, in one line.
      seconds: What it took, compiling included.
    """

    area: str
    name: str
    passed: bool
    detail: str
    seconds: float


@dataclass(frozen=True)
class Case:
    """A check to run.

    Attributes:
      area, name: See `Check`.
      run: Does it; returns what was found.

    `run` raises CheckFailed if it found something wrong, and may raise anything else.
    """

    area: str
    name: str
    run: Callable[[], str]


class CheckFailed(Exception):
    """Something is not as it should be; the message says what, in one line."""


def run_case(case: Case) -> Check:
    """Runs a check; whatever it raises is what is wrong."""
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
    """The largest error relative to the largest expected value.

    Raises:
      CheckFailed: It is above the tolerance, or something is not finite.
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
