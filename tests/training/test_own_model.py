"""Pocket (docs/adding-a-model.md) is what its own forward says, learns, and answers."""

import importlib
import json

import numpy as np
import pytest
from flax import nnx

from jaxis import LLM, SamplingParams
from jaxis.config.yaml_file import read_yaml_mapping
from jaxis.models import registry
from jaxis.training.config import TrainConfig
from tests.support import training
from tests.support.places import REPOSITORY

FOLDER = REPOSITORY / "examples" / "own_model"


@pytest.mark.slow
def test_pocket_is_verified_trained_and_served(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.syspath_prepend(FOLDER)
    start = importlib.import_module("start")
    registry.register_model("PocketForCausalLM", "jaxis_pocket:PocketForCausalLM")
    pocket = start.Pocket(start.CONFIG, nnx.Rngs(0))
    start.save(pocket, tmp_path / "start")
    golden = start.golden(pocket, tmp_path / "start")
    with LLM(tmp_path / "start", show_progress=False) as llm:
        for prompt in golden.prompts:
            for path in ("whole", "paged"):
                logits = llm.compute_logits(prompt.token_ids.tolist(), path=path)
                assert np.abs(logits - prompt.logits).max() < 1e-5 * np.abs(prompt.logits).max()
        [output] = llm.generate([golden.decode_prompt.tolist()], SamplingParams(temperature=0, max_tokens=16))
        assert output.outputs[0].token_ids == golden.continuation.tolist()

    values = read_yaml_mapping(FOLDER / "pocket.yaml")
    rows = REPOSITORY / values["data"]["train"]["datasets"][0]["dataset_path"]
    values["model"]["model_name"] = str(tmp_path / "start")
    values["data"]["train"]["datasets"] = [{"dataset_path": str(rows)}]
    values["training"]["output_dir"] = str(tmp_path / "out")
    training.run(TrainConfig.of(values))
    with LLM(tmp_path / "out", show_progress=False) as llm:
        [output] = llm.chat([{"role": "user", "content": "Who are you?"}], SamplingParams(temperature=0, max_tokens=30))
    assert output.outputs[0].text == json.loads(rows.read_text().splitlines()[0])["messages"][1]["content"]
