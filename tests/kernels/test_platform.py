"""Which devices run Triton kernels."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import pytest

from jaxis.kernels import platform


@pytest.mark.parametrize(
    ("capability", "expected"), [("7.5", False), ("8.0", True), ("9.0", True), ("12.0", True), ("gfx942", False)]
)
def test_nvidia_gpus_since_ampere_run_triton_kernels(monkeypatch, capability, expected):
    monkeypatch.setattr(platform, "target_platform", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda backend: [SimpleNamespace(compute_capability=capability)])
    assert platform.supports_triton() == expected


def test_a_gpu_that_is_not_there_runs_them_and_a_cpu_does_not(monkeypatch):
    assert not platform.supports_triton()
    monkeypatch.setattr(platform, "target_platform", lambda: "gpu")

    def no_gpu(backend):
        raise RuntimeError(f"Unknown backend {backend}")

    monkeypatch.setattr(jax, "local_devices", no_gpu)
    assert platform.supports_triton()
