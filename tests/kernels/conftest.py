"""Which cases run each time, on a machine that has several instruction sets."""

from __future__ import annotations

import pytest

from jaxis.kernels import native
from tests.support.isa import isas
from tests.support.kernel_paths import PLAIN


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The machine's best instruction set and plain JAX run every case; the portable one, one of each test.

    The other cases are slow ones: `make test-native`, which `make test` runs first, tests every kernel on every
    instruction set in C++.
    """
    always, seen = {native.isa(), PLAIN}, set()
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        isa = parameters.get("isa", parameters.get("path"))
        if isa not in isas() or isa in always:
            continue
        case = (item.path, item.originalname, isa)
        if case in seen or isa != "portable":
            item.add_marker(pytest.mark.slow)
        seen.add(case)
