"""Experts that lie whole on devices give what one device does, for the tokens of one data rank and of several."""

import os
import subprocess
import sys

import pytest

from tests.support.weight_stacks import KINDS

QUICK = ["float32", "MXFP4"]
OTHERS = [kind for kind in KINDS if kind not in QUICK and not kind.endswith("256")]


@pytest.mark.multi_device
@pytest.mark.parametrize(
    "kinds",
    [QUICK, pytest.param(OTHERS, marks=pytest.mark.slow)],
    ids=["two", "others"],
)
def test_four_devices_or_ranks_give_what_one_does(kinds):
    environment = os.environ | {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-m", "tests.support.spread_experts", *kinds]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
