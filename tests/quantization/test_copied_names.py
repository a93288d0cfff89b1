"""Quantized copies of families whose checkpoints have names of their own: the copies have these names."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from jaxis.loading.checkpoint import Checkpoint
from jaxis.quantization.arguments import parse_quantization
from jaxis.quantization.checkpoint import quantize_checkpoint
from tests.support import parity
from tests.support.quantized_models import load
from tests.support.quick_rows import quick_rows

FAMILIES = ("StarCoder2, window", "Falcon Mamba", "Hunyuan", "LFM2", "Ling 3", "Jamba", "Granite MoE")
_OF_EXPERTS = re.compile(r"\.(experts\b.*|input_linear|output_linear)$")


def modules(folder: Path) -> set[str]:
    """The modules that a checkpoint has tensors of; of stacked experts, the block."""
    with Checkpoint(folder) as checkpoint:
        return {_OF_EXPERTS.sub("", name.rpartition(".")[0]) for name in checkpoint.names()}


@pytest.mark.parametrize("name", quick_rows(FAMILIES, ("Granite MoE",)))
def test_a_copy_has_the_names_of_its_source(name, tmp_path):
    [family] = [family for family in parity.FAMILIES if family.name == name]
    source, copy = Path(parity.checkpoint_folder(family)), tmp_path / "copy"
    quantize_checkpoint(source, copy, parse_quantization("int8"))
    assert modules(copy) == modules(source)
    left = json.loads((copy / "config.json").read_text())["quantization_config"]["ignore"]
    assert {_OF_EXPERTS.sub("", module) for module in left} <= modules(source)
    logits, expected = (parity.run_model(model, (17,))[17][0] for model in (load(copy), load(source, "int8")))
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)
