"""Whole runs: what they promise of batches, of going on where they stopped, and of what they refuse."""

import json
import random
import resource
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import torch
import yaml
from safetensors.numpy import load_file
from torch.utils.flop_counter import FlopCounterMode

from jaxis.errors import CheckpointError, ConfigError, EngineError
from jaxis.host.progress import ProgressDisplay
from jaxis.layers.checkpoint_names import CheckpointNames
from jaxis.loading.open_checkpoint import read_hf_config
from jaxis.models.changed_checkpoint import write_changed
from jaxis.models.tied_tables import Tables
from jaxis.training import checkpoint as checkpoints
from jaxis.training import stored_arrays
from jaxis.training.base_model import open_base_model
from jaxis.training.batches import Batches, BatchShape
from jaxis.training.config import TrainConfig
from jaxis.training.run_log import MetricsFile
from jaxis.training.trainable import make_trainable
from jaxis.training.trainer import Trainer
from tests.support import training
from tests.support.adapters import base_model
from tests.support.quick_rows import quick_rows

ROWS = [
    training.dialogue("Where is the cat?", "On the mat.", "And now?", "Under it, I think."),
    training.dialogue("Count.", "One, two, three."),
    training.dialogue("Say hello.", "Hello!"),
    training.dialogue("Say more.", "Hello again, and good morning."),
]
KINDS = {"all weights": None, "adapters": {"lora_r": 2, "lora_dropout": 0.2}}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return training.write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", ROWS)


@pytest.mark.slow
def test_packs_and_micro_batches_have_the_gradient_of_one_batch(checkpoint, rows, tmp_path):
    config = training.train_config(checkpoint("qwen3"), rows, tmp_path / "out")
    examples = Trainer(config, lambda _: None).data.examples
    items = [(example,) for example in examples]
    model = make_trainable(config, open_base_model(config), ProgressDisplay(enabled=False))
    batches = {
        "one batch": Batches(items, BatchShape(1, 4, 128), seed=None),
        "micro-batches": Batches(items, BatchShape(4, 1, 128), seed=None),
        "a pack": Batches(items, BatchShape(1, 1, 256), seed=None, packs=True),
    }
    loss, gradient, weight = training.gradients(model, batches.pop("one batch").batch(0))
    assert weight == sum(example.num_learned for example in examples)
    for name, other in batches.items():
        other_loss, other_gradient, other_weight = training.gradients(model, other.batch(0))
        assert other_weight == weight, name
        assert abs(other_loss - loss) < 1e-6 * loss, name
        for parameter, value in gradient.items():
            error = np.abs(other_gradient[parameter] - value).max()
            assert error < 1e-6 * max(np.abs(each).max() for each in gradient.values()), (name, parameter)


class Killed(Exception):
    pass


def killed_in_step(monkeypatch, step):
    """A run ends at once before it has written down this step."""
    write = MetricsFile.write

    def killing(self, values):
        if values["step"] == step:
            raise Killed
        write(self, values)

    monkeypatch.setattr(MetricsFile, "write", killing)


def files_of(output):
    """Files that a run leaves behind: the bytes of each file but of what differs from run to run."""
    return {
        path.relative_to(output).as_posix(): path.read_bytes()
        for path in sorted(output.rglob("*"))
        if path.is_file() and path.name != "metrics.jsonl"
    }


def config_of(checkpoint, rows, output, kind="all weights", **changes):
    settings = {
        "max_steps": 6,
        "save_steps": 2,
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 1,
        "try_resume_from_last_checkpoint": True,
        "lr_scheduler_type": "cosine",
        "eval_strategy": "steps",
        "eval_steps": 3,
    }
    return training.train_config(
        checkpoint("qwen3"), rows, output, peft=KINDS[kind], validation=rows, **{**settings, **changes}
    )


@pytest.fixture(scope="module")
def whole(checkpoint, rows, tmp_path_factory):
    """The folder of a run of all weights."""
    output = tmp_path_factory.mktemp("run") / "whole"
    training.run(config_of(checkpoint, rows, output))
    return output


def check_killed(checkpoint, rows, output, whole, monkeypatch, kind):
    with monkeypatch.context() as patched:
        killed_in_step(patched, 5)
        with pytest.raises(Killed):
            training.run(config_of(checkpoint, rows, output, kind))
    assert training.metrics(output)[-1]["step"] == 4
    (output / "checkpoint-4").rename(output / ".checkpoint-4.partial")  # as if it had been killed in this save
    _, lines = training.run(config_of(checkpoint, rows, output, kind))
    assert any("checkpoint-2, step 2 of 6" in line for line in lines)
    assert files_of(output) == files_of(whole)
    assert training.metrics(output) == training.metrics(whole)


@pytest.mark.parametrize("kind", quick_rows(KINDS, ["adapters"]))
def test_a_step_is_compiled_once(checkpoint, tmp_path, kind):
    alike = training.write_rows(tmp_path / "rows.jsonl", [ROWS[1]] * 4)  # batches of one shape
    lowered = []

    def listen(event: str, duration_secs: float, **details: str | int) -> None:  # the names that JAX calls it by
        if event == "/jax/core/compile/jaxpr_to_mlir_module_duration":
            lowered.append(str(details["fun_name"]))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        training.run(config_of(checkpoint, alike, tmp_path / "out", kind, max_steps=3))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert sum("step" in name for name in lowered) == 1, lowered


@pytest.mark.slow
def test_a_run_that_was_killed_ends_as_one_that_was_not(checkpoint, rows, whole, tmp_path, monkeypatch):
    check_killed(checkpoint, rows, tmp_path / "killed", whole, monkeypatch, "all weights")


@pytest.mark.slow
def test_adapters_of_a_run_that_was_killed_are_those_of_one_that_was_not(checkpoint, rows, tmp_path, monkeypatch):
    training.run(config_of(checkpoint, rows, tmp_path / "whole", "adapters"))
    check_killed(checkpoint, rows, tmp_path / "killed", tmp_path / "whole", monkeypatch, "adapters")


def test_the_finished_model_has_in_transformers_the_loss_that_was_measured(checkpoint, rows, whole, tmp_path):
    measured = [line["eval_loss"] for line in training.metrics(whole) if "eval_loss" in line]
    assert measured[1] < measured[0]
    examples = Trainer(config_of(checkpoint, rows, tmp_path), lambda _: None).data.examples
    with torch.no_grad():
        loss = training.torch_loss(base_model(whole), examples).item()
    assert abs(loss - measured[-1]) < 1e-5 * loss


def test_a_batch_is_as_long_as_the_longest_example(checkpoint, tmp_path):
    rows = training.write_rows(
        tmp_path / "rows.jsonl", [training.dialogue("Hi.", "Ho!"), training.dialogue("Hi.", "Ho")]
    )
    data = Trainer(training.train_config(checkpoint("qwen3"), rows, tmp_path / "out"), lambda _: None).data
    assert data.split.batches.batch(0).ids.shape[-1] == max(len(each.ids) for each in data.examples) < 64


def test_operations_of_a_step_are_those_that_torch_counts(checkpoint, rows, tmp_path):
    folder, num_tokens = checkpoint("qwen3"), 24
    config = training.train_config(folder, rows, tmp_path)
    cost = make_trainable(config, open_base_model(config), None).cost
    with FlopCounterMode(display=False) as counter:
        base_model(folder)(torch.arange(num_tokens)[None]).logits.sum().backward()
    counted = counter.get_flop_counts()["Global"]
    products = {operation: count for operation, count in counted.items() if "bmm" not in str(operation)}
    assert num_tokens * (cost.of_token + cost.of_target) == sum(products.values())


def test_what_changes_a_run_that_goes_on_is_refused_by_name(checkpoint, rows, whole, tmp_path):
    with pytest.raises(ConfigError, match=r"checkpoint-6 of an earlier run: set training\.try_resume"):
        Trainer(config_of(checkpoint, rows, whole, try_resume_from_last_checkpoint=False), lambda _: None)
    with pytest.raises(ConfigError, match=r"training\.learning_rate=0\.01, and this run has 0\.5"):
        training.run(config_of(checkpoint, rows, whole, learning_rate=0.5))
    state = whole / "checkpoint-6" / "trainer_state.json"
    before = state.read_text()
    state.write_text(before.replace('"training.optimizer"', '"training.compile": false, "training.optimizer"'))
    with pytest.raises(CheckpointError, match=r"checkpoint-6 is of a version of jaxis with training\.compile: go on"):
        training.run(config_of(checkpoint, rows, whole))
    state.write_text(before)
    rows.write_text(rows.read_text().replace("Hello", "Good day"))
    with pytest.raises(ConfigError, match="the contents of"):
        training.run(config_of(checkpoint, rows, whole))
    training.write_rows(rows, ROWS)


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_last_checkpoint(checkpoint, rows, tmp_path):
    config = training.train_config(
        checkpoint("qwen3"), rows, tmp_path / "out", learning_rate=1e30, max_grad_norm=0, save_steps=1
    )
    with pytest.raises(EngineError, match=r"step 2: the loss is .*the last good checkpoint is .*checkpoint-1: lower"):
        training.run(config)
    assert not (tmp_path / "out" / "config.json").exists()


def test_a_model_has_no_files_of_the_run_that_made_its_base(checkpoint, tmp_path):
    base, output = shutil.copytree(checkpoint("qwen3"), tmp_path / "base"), tmp_path / "out"
    for name in ("metrics.jsonl", "answers.jsonl", "kept.txt"):
        (base / name).write_text("{}")
    output.mkdir()
    tables = Tables(read_hf_config(base))
    write_changed(base, output, lambda _, tensor: tensor, CheckpointNames(), tables, is_tied=True)
    assert (output / "kept.txt").exists()
    assert not any((output / name).exists() for name in ("metrics.jsonl", "answers.jsonl"))


@pytest.mark.slow
def test_a_full_disk_in_a_save_loses_nothing(checkpoint, rows, tmp_path, monkeypatch):
    config = training.train_config(checkpoint("qwen3"), rows, tmp_path / "out", save_steps=1)
    write, count = stored_arrays.write_arrays, [0]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def full(folder, arrays):
        count[0] += 1
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000 if count[0] == 3 else limits[0], limits[1]))
        try:
            write(folder, arrays)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    monkeypatch.setattr(checkpoints, "write_arrays", full)
    with pytest.raises(CheckpointError, match=r"checkpoint-3 cannot be written: File too large; free space"):
        training.run(config)
    left = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert left == ["checkpoint-1", "checkpoint-2", "metrics.jsonl"]


def test_checkpoints_are_orbaxs(checkpoint, rows, tmp_path):
    """Orbax itself reads them; a file that was cut is one line."""
    training.run(training.train_config(checkpoint("qwen3"), rows, tmp_path / "out", max_steps=1, save_steps=1))
    arrays = tmp_path / "out" / "checkpoint-1" / "state"
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        found = checkpointer.restore(arrays)
    trained = load_file(tmp_path / "out" / "model.safetensors")
    assert found["weights"].keys() == trained.keys()
    for name, weight in found["weights"].items():
        np.testing.assert_array_equal(weight.astype(trained[name].dtype), trained[name])
    assert len(found["optimizer"]) > 2 * len(trained)
    chunk = arrays / "weights.model.norm.weight" / "0"
    chunk.write_bytes(chunk.read_bytes()[:8])
    resumed = {"resume_from_checkpoint": str(arrays.parent), "max_steps": 1}
    with pytest.raises(CheckpointError, match=r"checkpoint-1 is damaged, .*: model\.norm\.weight: .*Not enough data"):
        training.run(training.train_config(checkpoint("qwen3"), rows, tmp_path / "rest", save_steps=1, **resumed))


@pytest.mark.parametrize(
    ("section", "field", "value", "named"),
    [
        ("training", "learning_rat", 1, r"training\.learning_rat is not a known field"),
        ("training", "trainer_type", "TRL_GKD", r"training\.trainer_type='TRL_GKD'"),
        ("training", "optimizer", "lion", r"training\.optimizer='lion' must be one of adamw"),
        ("training", "lr_scheduler_type", "polynomial", "must be one of linear, cosine"),
        ("training", "enable_mlflow", True, r"training\.enable_mlflow=True cannot be honoured"),
        ("training", "profiler", {"enable_cpu_profiling": 1}, r"profiler\.enable_cpu_profiling=1 must be true"),
        ("training", "per_device_train_batch_size", 0, "must be an integer from 1"),
        ("training", "eval_strategy", "steps", r"needs data\.validation\.datasets"),
        ("peft", "use_dora", True, r"peft\.use_dora=True cannot be honoured"),
        ("peft", "q_lora", True, r"set training\.use_peft"),
        ("model", "freeze_layers", ["a"], r"model\.freeze_layers"),
        ("training", "metrics_function", "scores", r"must be module:function"),
        ("training", "metrics_function", "scores:exact", r"needs training\.eval_strategy"),
        ("training", "trainer_kwargs", {"load_best_model_at_end": True}, r"needs training\.eval_strategy"),
        (
            "training",
            "trainer_kwargs",
            {"loss_type": "hinge"},
            r"training\.trainer_kwargs\.loss_type is not a known field",
        ),
        (
            "data",
            "train",
            {"datasets": [{"dataset_path": "a", "mixture_proportion": 0.5}, {"dataset_path": "b"}]},
            r"mixture_proportion is missing for 1 of 2 files",
        ),
        (
            "data",
            "train",
            {"datasets": [{"dataset_path": name, "mixture_proportion": 0.6} for name in "ab"]},
            r"mixture_proportion must add up to 1, not 1\.2",
        ),
        ("fsdp", "sharding_strategy", "HYBRID_SHARD", r"fsdp\.sharding_strategy='HYBRID_SHARD' cannot be honoured"),
        *(
            ("data", "train", {"datasets": [{"dataset_path": "a", **more}], "stream": True, **given}, named)
            for more, given, named in (
                ({}, {}, r"data\.train\.stream=True cannot be honoured: set training\.max_steps"),
                ({}, {"pack": True}, r"data\.train\.stream=True .*: leave pack out"),
                ({"sample_count": 3}, {}, r"data\.train\.stream=True .*: leave sample_count"),
            )
        ),
        ("data", "validation", {"stream": True}, r"data\.validation\.stream=True cannot be honoured"),
        ("data", "train", {"datasets": []}, r"data\.train\.datasets is empty"),
        ("data", "train", {"datasets": [{"dataset_name": "set"}]}, r"data\.datasets\.dataset_name='set' .* owner/name"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(section, field, value, named):
    values = {"data": {"train": {"datasets": [{"dataset_path": "rows.jsonl"}]}}}
    values[section] = {**values.get(section, {}), field: value}
    with pytest.raises(ConfigError, match=named) as caught:
        TrainConfig.of(values)
    assert "\n" not in str(caught.value)


def test_a_token_beyond_the_vocabulary_is_named_before_the_first_step(checkpoint, rows, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("qwen3"), folder)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "vocab_size": 300}))
    with pytest.raises(
        ConfigError, match=r"line \d+: has token \d+, '.+', of the tokenizer of .*model, whose"
    ) as caught:
        Trainer(training.train_config(folder, rows, tmp_path / "out"), lambda _: None)
    assert "a vocabulary of 300" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_of_pytorch_alone_is_accepted_with_a_notice():
    values = {
        "data": {"train": {"datasets": [{"dataset_path": "rows.jsonl"}]}},
        "training": {"compile": True, "dataloader_num_workers": 4, "ddp_find_unused_parameters": False},
        "fsdp": {"enable_fsdp": False},
    }
    assert [note.split()[0] for note in TrainConfig.of(values).notes()] == [
        "training.compile",
        "training.dataloader_num_workers",
    ]


def command(config):
    code = "from jaxis.cli.main import main; main()"
    return [sys.executable, "-c", code, "train", "-c", str(config)]


def write_config(path, checkpoint, rows, output, kind, steps):
    path.write_text(
        yaml.safe_dump(
            {
                "model": {"model_name": str(checkpoint)},
                "data": {"train": {"datasets": [{"dataset_path": str(rows)}]}},
                "training": {
                    "output_dir": str(output),
                    "max_steps": steps,
                    "save_steps": 3,
                    "learning_rate": 1e-3,
                    "per_device_train_batch_size": 2,
                    "try_resume_from_last_checkpoint": True,
                    "use_peft": KINDS[kind] is not None,
                    "trainer_kwargs": {"save_total_limit": 2},
                },
                "peft": KINDS[kind] or {},
            }
        )
    )
    return path


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_twenty_kills_at_any_time_change_no_byte(checkpoint, rows, tmp_path, kind):
    model, steps = checkpoint("qwen3"), 300
    whole = write_config(tmp_path / "whole.yaml", model, rows, tmp_path / "whole", kind, steps)
    subprocess.run(command(whole), check=True, capture_output=True)
    killed = write_config(tmp_path / "killed.yaml", model, rows, tmp_path / "killed", kind, steps)
    draw, done = random.Random(0), 0
    path = tmp_path / "killed" / "metrics.jsonl"
    while done < 20:
        process = subprocess.Popen(command(killed), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        before = path.stat().st_size if path.exists() else 0
        # Kills fall into steps and saves, not into the start alone.
        while process.poll() is None and (not path.exists() or path.stat().st_size == before):
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.3))
        assert process.poll() is None, "the run ended before it was killed often enough"
        process.kill()
        process.wait()
        done += 1
    subprocess.run(command(killed), check=True, capture_output=True)
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "whole")
    assert training.metrics(tmp_path / "killed") == training.metrics(tmp_path / "whole")


@pytest.mark.slow
def test_sigterm_saves_and_prints_the_command_that_goes_on(checkpoint, rows, tmp_path):
    config = write_config(
        tmp_path / "config.yaml", checkpoint("qwen3"), rows, tmp_path / "out", "adapters", steps=100_000
    )
    process = subprocess.Popen(command(config), stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "out" / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size):  # a step is done
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate()
    assert process.returncode == 0
    last = errors.splitlines()[-1].split()
    assert last[:4] == ["jaxis", "train", "-c", str(config)]
    assert last[-2:] == ["--training.try_resume_from_last_checkpoint", "true"]
    assert len(list((tmp_path / "out").glob("checkpoint-*"))) >= 1
