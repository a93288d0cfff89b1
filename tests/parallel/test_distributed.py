"""Properties of JAX's processes and collectives that jaxis relies on, and those that it must not rely on."""

import signal
import time

import pytest

from tests.support.host_processes import free_port, host_processes, run_in_processes

PROBES = "tests.support.jax_probes"


@pytest.mark.multi_device
def test_steps_with_donated_caches_run_over_two_processes():
    for output in run_in_processes(PROBES, "steps"):
        assert "devices 4" in output


@pytest.mark.multi_device
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_devices", "found"),
    [("partly_manual", 4, "exported for tpu on 4 devices"), ("transfer", 1, "pulled"), ("gathers", 1, "old contents")],
)
def test_in_one_process(name, num_devices, found):
    [output] = run_in_processes(PROBES, name, 1, num_devices=num_devices)
    assert found in output


@pytest.mark.multi_device
@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["endless", "idle"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victim", [0, 1])
def test_jax_ends_the_others_only_after_its_heartbeat(scenario, number, victim):
    """Except where process 0, which has the coordinator, is killed."""
    port = str(free_port())
    with host_processes([["-m", PROBES, scenario, str(rank), port] for rank in range(2)]) as hosts:
        for host in hosts:
            host.wait_for("begun")
        started, other = time.monotonic(), hosts[1 - victim]
        hosts[victim].process.send_signal(number)
        if scenario == "endless" and number == signal.SIGKILL and victim == 1:
            other.wait_for("raised", 10)  # the collective fails at once
        assert other.wait(60) == -signal.SIGABRT
        if not (number == signal.SIGKILL and victim == 0):
            assert time.monotonic() - started > 2


@pytest.mark.multi_device
@pytest.mark.slow
def test_a_late_process_fails_psum_scatter_between_processes_but_not_psum():
    outputs = run_in_processes(PROBES, "late", num_devices=1)
    assert all("psum completed" in output for output in outputs)
    assert all("psum_scatter failed" in output for output in outputs)
