"""The example that takes a GGUF file through all stages of training, and serves what comes out."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxis.engine.opened_model import EMBEDDED_MODEL
from tests.support.host_processes import free_port

EXAMPLE = Path(__file__).parents[2] / "examples" / "training" / "laptop.py"


@pytest.mark.slow
def test_a_gguf_file_is_trained_in_three_stages_and_served(tmp_path):
    jaxis, model = Path(sys.executable).with_name("jaxis"), tmp_path / "tiny.gguf"
    subprocess.run([jaxis, "convert", EMBEDDED_MODEL, model, "--to", "gguf"], check=True)
    command = [sys.executable, EXAMPLE, model, "--folder", tmp_path / "made", "--steps", "3", "--learning-rate", "5e-3"]
    run = subprocess.run([*command, "--port", str(free_port())], check=True, stdout=subprocess.PIPE, text=True)
    rows = {name: row for row in run.stdout.splitlines() if (name := row.split(" | ")[0]).startswith("| ")}
    assert list(rows) == ["| adapter", "| distillation", "| grpo"]
    first, last = map(float, re.search(r"loss (\S+) to (\S+?) ", rows["| adapter"]).groups())
    assert last < first
    assert re.search(r"served: \d+ of 32 right", run.stdout)
