"""Runs a test file again with every other instruction set that the machine has, and without native kernels."""

import os
import subprocess
import sys

from jaxis.kernels import native


def others() -> list[str]:
    """Names of the paths beside the one in use; none in a run that was told its path, or without the library."""
    library = native.library()
    if "JAXIS_CPU_ISA" in os.environ or library is None:
        return []
    return [name for name in library.jaxis_supported_isas().decode().split() if name != native.isa()] + ["none"]


def run_again(test_file: str, isa: str) -> None:
    """Runs the file's tests in a process of its own, on the path named."""
    environment = os.environ | {"JAXIS_CPU_ISA": isa, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("PYTEST_ADDOPTS", None)
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:xdist", test_file],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-1000:]
