"""Properties of JAX's processes that jaxis relies on."""

import pytest

from tests.support.host_processes import run_in_processes

PROBES = "tests.parallel.donated_caches"


@pytest.mark.multi_device
def test_steps_with_donated_caches_run_over_two_processes():
    for output in run_in_processes(PROBES, "steps"):
        assert "devices 4" in output
