"""Measurements during training: answers on live weights, the best step, and TensorBoard's events."""

import dataclasses
import importlib.machinery
import json
import shutil
import struct
import sys
import types

import jax
import pytest
import torch

from jaxis import LLM, SamplingParams
from jaxis.errors import ConfigError
from jaxis.training.answers import load_scorer, scores_of
from jaxis.training.trainer import Trainer
from tests.support import training
from tests.support.adapters import base_model

ROWS = [
    {**training.dialogue("Where is the cat?", "On the mat.", "And now?", "Under it."), "topic": "cats"},
    training.dialogue("Count.", "One, two, three."),
]
SCORER = """
calls = []

def score(prompts, completions, completion_ids, reference, topic, **_):
    calls.append((prompts, completions, completion_ids, reference, topic))
    return [(0.25, 0.75, 0.5, 0.0)[len(calls) - 1]] * len(prompts)
"""


@pytest.fixture
def config(checkpoint, tmp_path, monkeypatch):
    """A run of four steps, each of them measured; the second one scores best."""
    (tmp_path / "my_scores.py").write_text(SCORER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "my_scores", raising=False)
    rows = training.write_rows(tmp_path / "rows.jsonl", ROWS)
    return training.train_config(
        checkpoint("qwen3"),
        rows,
        tmp_path / "out",
        validation=rows,
        max_steps=4,
        save_steps=3,
        eval_strategy="steps",
        eval_steps=1,
        metrics_function="my_scores:score",
        enable_tensorboard=True,
        trainer_kwargs={
            "metric_for_best_model": "score",
            "load_best_model_at_end": True,
            "save_total_limit": 1,
            "max_completion_length": 6,
        },
    )


def events(folder):
    """(step, name) -> value, of TensorBoard's files: records of a length, its checksum, a message and its checksum."""
    from tensorboardX.proto.event_pb2 import Event

    found = {}
    for path in folder.iterdir():
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            found |= {(event.step, value.tag): value.simple_value for value in event.summary.value}
            data = data[16 + length :]
    return found


@pytest.mark.slow
def test_live_weights_answer_and_the_best_step_is_the_finished_model(config, tmp_path, checkpoint):
    output = tmp_path / "out"
    _, lines = training.run(config)
    measured = {line["step"]: line for line in training.metrics(output) if "eval_loss" in line}
    assert [measured[step]["eval_score"] for step in (1, 2, 3, 4)] == [0.25, 0.75, 0.5, 0.0]
    assert any("the model is that of step 2" in line for line in lines)
    assert sorted(path.name for path in output.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-3"]
    examples = Trainer(config_resumed(config), lambda _: None).data.examples
    with torch.no_grad():
        loss = training.torch_loss(base_model(output), examples).item()
    assert abs(loss - measured[2]["eval_loss"]) < 1e-5 * loss

    # A fresh engine on the folder, which is the model after step 2.
    answers = [json.loads(line) for line in (output / "answers.jsonl").read_text().splitlines()]
    with LLM(output, show_progress=False, max_model_len=128) as llm:
        prompts = [ROWS[0]["messages"][:3], ROWS[1]["messages"][:1]]
        fresh = llm.chat(prompts, SamplingParams(temperature=0.0, max_tokens=6))
    assert [line["answer"] for line in answers if line["step"] == 2] == [each.outputs[0].text for each in fresh]
    import my_scores

    asked, completions, ids, reference, topic = my_scores.calls[1]
    assert asked == prompts
    assert completions == [[{"role": "assistant", "content": each.outputs[0].text}] for each in fresh]
    assert ids == [each.outputs[0].token_ids for each in fresh]
    assert (reference, topic) == (["Under it.", "One, two, three."], ["cats", None])

    expected = {
        (line["step"], name): line[name] for line in training.metrics(output) for name in line if name != "step"
    }
    found = {key: value for key, value in events(output / "runs").items() if key[1] not in training.SPEED}
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_a_run_that_goes_on_measures_and_answers_as_before(config, tmp_path):
    output = tmp_path / "out"
    training.run(config)
    before, answers = training.metrics(output), (output / "answers.jsonl").read_text()
    import my_scores

    shutil.rmtree(output / "checkpoint-3")
    my_scores.calls[:] = my_scores.calls[:2]
    _, lines = training.run(config_resumed(config))
    assert any("the model is that of step 2" in line for line in lines)
    assert training.metrics(output) == before
    assert (output / "answers.jsonl").read_text() == answers


def config_resumed(config):
    return dataclasses.replace(
        config, training=dataclasses.replace(config.training, try_resume_from_last_checkpoint=True)
    )


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("", "has no function 'score'"),
        ("import no_such_module", "cannot be imported: No module named 'no_such_module'"),
        ("def score(**_):\n    return [1.0]", r"must return 2 finite numbers"),
        ("def score(**_):\n    raise KeyError('x')", "failed: KeyError: 'x'"),
    ],
)
def test_a_scorer_that_cannot_score_is_named(config, tmp_path, source, named):
    (tmp_path / "my_scores.py").write_text(source)
    with pytest.raises(ConfigError, match=named) as caught:
        scores_of(
            load_scorer("my_scores:score", "training.metrics_function"), "my_scores:score", {"completions": [1, 2]}
        )
    assert "\n" not in str(caught.value)


def test_wandb_gets_each_step_and_a_trace_has_the_steps_that_were_asked_for(checkpoint, tmp_path, monkeypatch):
    rows, logged = training.write_rows(tmp_path / "rows.jsonl", [training.dialogue("Count.", "One, two.")]), []
    wandb = types.ModuleType("wandb")
    wandb.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    run = types.SimpleNamespace(log=lambda values, step: logged.append((step, values)), finish=lambda: None)
    wandb.init = lambda **settings: logged.append((settings["project"], settings["name"])) or run
    wandb.Error = RuntimeError
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: logged.append(("trace", folder.name)))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: logged.append(("trace", None)))
    schedule = {"enable_schedule": True, "skip_first": 1, "wait": 1, "warmup": 0, "active": 1, "repeat": 2}
    options = {"profiler": {"enable_cpu_profiling": True, "schedule": schedule}, "run_name": "one"}
    config = training.train_config(
        checkpoint("qwen3"), rows, tmp_path / "out", max_steps=6, save_final_model=False, enable_wandb=True, **options
    )
    training.run(config)
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [step for step, _ in logged] == ["jaxis", 1, 2, "trace", 3, "trace", 4, "trace", 5, "trace", 6]
    assert [values for step, values in logged if isinstance(step, int)] == [
        {name: value for name, value in line.items() if name != "step"} for line in lines
    ]
