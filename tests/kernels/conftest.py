"""Which cases run each time, on a machine that has several instruction sets."""

from __future__ import annotations

from typing import Any

import pytest

from jaxis.kernels import native
from tests.support.isa import isas
from tests.support.kernel_paths import PLAIN

# Parameters of tests by which other code of a kernel runs; by the others, the same code runs on other sizes and values.
OF_THE_KERNEL = (
    "dtype",
    "qtype",
    "method",
    "scheme",
    "activation",
    "has_bias",
    "has_biases",
    "with_norms",
    "interleaved",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The machine's best instruction set and plain JAX run every case; another, one of each kernel in each test.

    The other cases are slow ones. `make test-native` too tests every kernel on every instruction set, in C++.
    """
    always, seen = {native.isa(), PLAIN}, set()
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        isa = parameters.get("isa", parameters.get("path"))
        if isa not in isas() or isa in always:
            continue
        case = (item.path, item.originalname, isa, *(_kind(parameters.get(name)) for name in OF_THE_KERNEL))
        if case in seen:
            item.add_marker(pytest.mark.slow)
        seen.add(case)


def _kind(value: Any) -> str:
    """What decides the kernel; of a scheme (type, tile, calibration, ...) not how long its tiles are."""
    if isinstance(value, tuple):
        qtype, tile, *rest = value
        value = (qtype, tile is None, *rest)
    return repr(value)
