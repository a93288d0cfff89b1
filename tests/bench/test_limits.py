"""Counts of bytes and operations, with arrays too small to take time."""

import subprocess

import pytest

from jaxis.bench import limits
from jaxis.errors import EngineError


@pytest.fixture(autouse=True)
def small_and_two_seconds_each(monkeypatch):
    """1 MiB in all, 32 x 32 matrices, and every pass takes two seconds by the clock."""
    monkeypatch.setattr(limits, "ARRAY_BYTES", 1 << 20)
    monkeypatch.setattr(limits, "MATRIX_SIZE", 32)

    def best_seconds(function):
        function()
        return 2.0

    monkeypatch.setattr(limits, "_best_seconds", best_seconds)


def test_the_host_s_threads_share_the_arrays():
    measured = limits.measure_host(4)
    assert measured.num_threads == 4
    assert measured.read_bytes_per_second == (1 << 19) / 2
    assert measured.copy_bytes_per_second == 2 * (1 << 19) / 2
    assert measured.flops_per_second == 2 * 32**3 / 2


def test_a_device_is_measured_by_copy_and_product():
    measured = limits.measure_device_limits()
    assert (measured.num_threads, measured.read_bytes_per_second) == (None, None)
    assert measured.memory_bytes_per_second == 2 * (1 << 20) / 2
    assert measured.flops_per_second == 2 * 128**3 / 2


def test_the_process_that_measures_gets_its_threads(monkeypatch):
    seen = {}

    def run(command, env, **_):
        seen.update(command=command, threads=env["OPENBLAS_NUM_THREADS"])
        return subprocess.CompletedProcess(
            command,
            0,
            '{"num_threads": 3, "read_bytes_per_second": 1, "copy_bytes_per_second": 2, "flops_per_second": 3}',
        )

    monkeypatch.setattr(limits.subprocess, "run", run)
    assert limits.measure_limits(3) == limits.Limits(3, 1, 2, 3)
    assert seen["threads"] == "3"
    assert seen["command"][-1] == "3"


def test_a_process_that_fails_is_one_clear_error(monkeypatch):
    monkeypatch.setattr(limits.sys, "executable", "false")
    with pytest.raises(EngineError, match=r"2 threads: exit code 1$"):
        limits.measure_limits(2)
