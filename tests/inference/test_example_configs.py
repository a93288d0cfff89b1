"""The examples: every one is read without complaint, and those of the embedded model run."""

import json

import pytest

from jaxis.engine.model_params import to_llm_arguments
from jaxis.inference import InferenceConfig, JAXInferenceEngine
from tests.support.places import REPOSITORY

EXAMPLES = REPOSITORY / "examples" / "configs"
TASKS = {"chat", "completion", "guided_json", "quantized"}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_it_is_read_and_everything_in_it_has_an_effect(path):
    config = InferenceConfig.from_yaml(path)
    assert config.notes() == []
    assert to_llm_arguments(config.model)["dtype"] == ("auto" if path.stem in TASKS else "bfloat16")
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
