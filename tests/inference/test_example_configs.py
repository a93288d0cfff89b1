"""The examples: every one is read without complaint, each family has one, and those of the embedded model run."""

import json

import pytest

from jaxis.inference import InferenceConfig, JAXInferenceEngine
from jaxis.inference.model_params import to_llm_arguments
from jaxis.models.registry import built_in_models
from tests.support.places import REPOSITORY

EXAMPLES = REPOSITORY / "examples" / "configs"
CONFIGS = sorted(EXAMPLES.rglob("*.yaml"))
TASKS = {"chat", "completion", "guided_json", "quantized"}


def test_every_family_and_every_task_has_one():
    families = {model.__module__.rpartition(".")[2] for model in built_in_models().values()}
    unpublished = {"flint", "lfm3"}  # have no checkpoint to name
    assert {path.stem for path in (EXAMPLES / "families").iterdir()} == families - unpublished
    assert {path.stem for path in EXAMPLES.glob("*.yaml")} == TASKS


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_it_is_read_and_everything_in_it_has_an_effect(path):
    config = InferenceConfig.from_yaml(path)
    assert config.notes() == []
    assert to_llm_arguments(config.model)["dtype"] == ("bfloat16" if path.parent.name == "families" else "auto")
    assert (EXAMPLES / config.input_path).is_file()
    assert config.output_path.endswith(".jsonl")


@pytest.mark.sampled(6)
@pytest.mark.parametrize("task", sorted(TASKS))
def test_tasks_run(task, tmp_path):
    config = InferenceConfig.from_yaml(EXAMPLES / f"{task}.yaml")
    paths = {"input_path": EXAMPLES / "conversations.jsonl", "output_path": tmp_path / "out.jsonl"}
    with JAXInferenceEngine(config.model, show_progress=False) as engine:
        results = engine.infer(inference_config={"generation": config.generation, **paths})
    assert [result.conversation_id for result in results] == ["capital", "sum", "colour"]
    answer = results[0].messages[-1].content
    if task == "guided_json":
        assert isinstance(json.loads(answer)["answer"], str)
    elif task == "completion":
        assert "\n" not in answer
    else:
        assert "Paris" in answer
