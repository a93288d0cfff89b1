"""Runs a test on each instruction set of the native kernels, and on plain JAX."""

from __future__ import annotations

import pytest

from jaxis.kernels import native
from tests.support import isa

PLAIN = "plain"
each_path = pytest.mark.parametrize("path", [*isa.isas(), PLAIN], indirect=True)


@pytest.fixture
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The path in use: parametrized by `each_path`. Functions jitted on another must be jitted again."""
    library = None if request.param == PLAIN else isa.library_for(request.param)
    monkeypatch.setattr(native, "library", lambda: library)
    return request.param
