"""The compilers of accelerators, for tests marked compile_tpu and compile_gpu."""

from __future__ import annotations

import importlib.util
import os

import pytest

DEFAULT_GPU_TARGET = "h100"
# Marker -> (a module of the compiler, the extra that brings it).
_COMPILERS = {"compile_tpu": ("libtpu", "compile-tpu"), "compile_gpu": ("jax_cuda13_plugin", "compile-gpu")}


def skip_without_compilers(items: list[pytest.Item]) -> None:
    """Marks those tests to be skipped whose compiler is not there, with what to do about it."""
    for marker, (module, extra) in _COMPILERS.items():
        if (reason := _reason_to_skip(module, extra)) is not None:
            for item in items:
                if item.get_closest_marker(marker) is not None:
                    item.add_marker(pytest.mark.skip(reason=reason))


def _reason_to_skip(module: str, extra: str) -> str | None:
    if importlib.util.find_spec(module) is None:
        return f"{module} is not installed: make test-compile, or pip install 'jaxis[{extra}]'"
    if os.environ.get("JAX_PLATFORMS") != "cpu":
        return "JAX_PLATFORMS is not cpu, so JAX would look for an accelerator"
    return None
