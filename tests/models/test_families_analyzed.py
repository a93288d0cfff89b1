"""`jaxis analyze` on a checkpoint of every family, as transformers saves it."""

import json
import math
from pathlib import Path

import pytest
from safetensors import safe_open

from jaxis.bringup.analyze.analysis import analyze
from tests.support.parity import EVERY_KIND, FAMILIES, checkpoint_folder
from tests.support.quick_rows import quick_rows


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "family", quick_rows(FAMILIES, [f for f in FAMILIES if f.name in EVERY_KIND]), ids=lambda family: family.name
)
def test_a_family_of_ours_is_understood_completely(family):
    folder = checkpoint_folder(family)
    analysis = analyze(folder)
    assert analysis.problems == ()
    assert analysis.can_run
    assert analysis.tensor_problems == ()
    assert {key.status for key in analysis.keys} <= {"supported", "default", "neutral"}
    assert [axis.name for axis in analysis.axes if axis.missing] == []
    with safe_open(Path(folder, "model.safetensors"), "numpy") as file:
        sizes = [math.prod(file.get_slice(name).get_shape()) for name in file.keys()]  # noqa: SIM118
    assert analysis.num_tensors == len(sizes)
    assert analysis.parameters.total == sum(sizes)
    # Whatever is read counts as a key; nothing of the file is left out.
    config = json.loads(Path(folder, "config.json").read_text())
    assert {key.key.partition(".")[0] for key in analysis.keys} == set(config)
