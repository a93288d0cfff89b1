"""Runs native kernels on each instruction set that this machine has, in one process.

The library picks its instruction set once, when it is first asked; a copy of the file is another library, which picks
again.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from jaxis.kernels import native


def isas() -> list[str]:
    """The instruction sets that this machine can run the kernels on."""
    library = native.library()
    return [] if library is None else library.jaxis_supported_isas().decode().split()


@functools.cache
def library_for(isa: str) -> ctypes.CDLL:
    """The native library where it uses this instruction set, else a copy that does."""
    if isa == native.isa():
        return native.library()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        copy = shutil.copy(native.library()._name, Path(folder, f"libjaxis-{isa}-{os.getpid()}.so"))
        patch.setenv("JAXIS_CPU_ISA", isa)
        library = native.load(Path(copy))
        assert library.jaxis_isa().decode() == isa
    return library


each_isa = pytest.mark.parametrize(
    "isa", isas() or [pytest.param("none", marks=pytest.mark.skip("the native library is not built"))], indirect=True
)


@pytest.fixture
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The instruction set in use: parametrized by `each_isa`."""
    library = library_for(request.param)
    monkeypatch.setattr(native, "library", lambda: library)
    return request.param
