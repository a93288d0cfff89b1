"""For owners of one GPU, ten minutes: `pytest -m single_gpu`.

The installation's own examination (kernels against their definitions in float64, the embedded model's answers, speed
beside the memory's limit), then families end to end against `transformers`. With `JAX_PLATFORMS=cpu` it is rehearsed
without one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.cli_model import JAXIS

pytestmark = [
    pytest.mark.single_gpu,
    pytest.mark.skipif(
        shutil.which("nvidia-smi") is None and "JAX_PLATFORMS" not in os.environ, reason="there is no NVIDIA GPU"
    ),
]

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
REHEARSED = os.environ.get("JAX_PLATFORMS") == "cpu"


def run_jaxis(*arguments):
    """Runs the command with XLA's optimizations, as users do; returns what it did, whatever its exit status."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return subprocess.run(
        [*JAXIS, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("doctor")
    process = run_jaxis("doctor", "--output", str(folder))
    assert (folder / "doctor.json").is_file(), process.stderr
    return json.loads((folder / "doctor.json").read_text())


def checks_of(report, area):
    return [check for check in report["checks"] if check["area"] == area]


def test_the_report_is_of_a_gpu(report):
    [devices] = checks_of(report, "devices")
    assert devices["passed"], devices["detail"]
    assert REHEARSED or "NVIDIA" in devices["detail"]


def test_kernels_agree_with_their_definitions(report):
    checks = checks_of(report, "kernels")
    assert len(checks) > 30
    assert [check for check in checks if not check["passed"]] == []


def test_the_embedded_model_answers_as_it_was_trained_to(report):
    checks = checks_of(report, "model")
    assert checks
    assert [check for check in checks if not check["passed"]] == []


def test_a_decode_is_measured_beside_the_limit_of_memory(report):
    [speed] = checks_of(report, "speed")
    assert speed["passed"], speed["detail"]
    print(speed["detail"])


# Attention with grouped heads; experts, sinks and windows; latent attention; a recurrence.
@pytest.mark.parametrize("name", ["qwen3-0.6b", "gpt-oss-20b", "deepseek-v2-lite", "mamba-130m"])
def test_a_family_agrees_with_transformers_in_every_path(name, tmp_path):
    config = tmp_path / "config.json"
    shutil.copy(CONFIGS / f"{name}.json", config)
    process = run_jaxis("verify", str(config))
    assert process.returncode == 0, process.stdout + process.stderr
