"""`jaxis verify` of a checkpoint that sees: its tower is compared, and a wrong one is found."""

import json

import pytest
from typer.testing import CliRunner

from jaxis import LLM
from jaxis.bringup.verify.compare import GATES
from jaxis.bringup.verify.images import ask_about_image, check_images
from jaxis.bringup.verify.reference import Reference
from jaxis.cli.main import app
from tests.support.vision_checkpoints import write_mistral3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mistral3")
    write_mistral3(folder)
    return folder


def test_a_tower_is_compared_and_a_wrong_one_differs(folder):
    config = json.loads((folder / "config.json").read_text())
    answer = ask_about_image(Reference.from_folder(folder), folder, config)
    sizes = {"max_num_batched_tokens": 48, "block_size": 16, "max_model_len": 256, "kv_cache_memory": "2MiB"}
    with LLM(str(folder), dtype="float32", show_progress=False, **sizes) as llm:
        right = check_images(llm, answer, GATES["float32"])
        encoder = llm.engine.runner.feature("inputs").encoder
        # Those that are not packed: norms, biases and the kernels of patches.
        encoder.arrays = [array if array.dtype == "uint8" else array * 1.01 for array in encoder.arrays]
        encoder._unused.clear()
        wrong = check_images(llm, answer, GATES["float32"])
    assert right.passed
    assert right.num_embeddings == len(answer.embeddings) > 20
    assert right.embeddings_error < 1e-5
    assert not wrong.passed
    assert wrong.embeddings_error > 1e-3
    assert wrong.comparison.relative_error > 1e-4


@pytest.mark.slow
def test_the_command_has_rows_for_the_image(folder):
    result = CliRunner().invoke(app, ["verify", str(folder), "--prompt-lens", "5"])
    assert result.exit_code == 0, result.output
    assert "embeddings" in result.output
    assert "logits with it" in result.output
