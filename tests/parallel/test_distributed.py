"""Properties of JAX's processes and collectives that jaxis relies on, and those that it must not rely on."""

import pytest

from tests.support.host_processes import run_in_processes

PROBES = "tests.support.jax_probes"


@pytest.mark.multi_device
def test_steps_with_donated_caches_run_over_two_processes():
    for output in run_in_processes(PROBES, "steps"):
        assert "devices 4" in output
