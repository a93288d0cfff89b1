"""The memory that `jaxis plan --train` says a training needs is that of its arrays and its compiled step."""

import dataclasses
import json

import jax
import pytest
from typer.testing import CliRunner

from jaxis.cli.main import app
from jaxis.host.progress import ProgressDisplay
from jaxis.training.memory_plan import training_memory
from jaxis.training.optimizer import make_optimizer
from jaxis.training.step import make_step
from jaxis.training.trainable import make_trainable
from jaxis.training.trainer import Trainer, method_of
from tests.support import training
from tests.support.quick_rows import quick_rows
from tests.support.tiny_checkpoints import write_checkpoint

SIZES = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "vocab_size": 4096, "head_dim": 32}
KINDS = {
    "all weights": {},
    "bfloat16": {"mixed_precision_dtype": "BF16"},
    "layers computed again": {"enable_gradient_checkpointing": True},
    "sgd": {"optimizer": "sgd", "sgd_momentum": 0.9, "gradient_accumulation_steps": 2},
    "adapters": {"peft": {"lora_r": 8}},
    "adapters, layers computed again": {"peft": {"lora_r": 8}, "enable_gradient_checkpointing": True},
    "adapters, int8": {"peft": {"lora_r": 8, "q_lora": True, "q_lora_bits": 8}},
    "adapters, int4": {"peft": {"lora_r": 8, "q_lora": True, "q_lora_bits": 4}},
    "packed": {"data": {"pack": True}},
    "preferences": {"trainer_type": "TRL_DPO"},
    "preferences, adapters": {"trainer_type": "TRL_DPO", "peft": {"lora_r": 8}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model") / "model", "qwen3", **SIZES)


def config_of(kind, folder, tmp_path, **changes):
    text = "one two three four five six seven eight nine ten " * 12
    row = training.dialogue("Count.", text)
    if KINDS[kind].get("trainer_type") == "TRL_DPO":
        row = {"prompt": "Count.", "chosen": text, "rejected": text[::-1]}
    rows = training.write_rows(tmp_path / "rows.jsonl", [row] * 4)
    return training.train_config(folder, rows, tmp_path / "out", **{**KINDS[kind], **changes})


def num_bytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.slow
@pytest.mark.parametrize("kind", quick_rows(KINDS, ["adapters, int8"]))
def test_what_a_training_needs_is_what_its_arrays_and_its_compiled_step_take(kind, folder, tmp_path):
    config = config_of(kind, folder, tmp_path)
    trainer = Trainer(config, lambda _: None)
    batch = trainer.data.split.batches.batch(0)
    found = training_memory(config, trainer.base, batch, 1)
    model = make_trainable(config, trainer.base, ProgressDisplay(enabled=False))
    optimizer = make_optimizer(config.training, lambda _: jax.numpy.asarray(1e-3))
    state = optimizer.init(model.initial)
    held = [num_bytes(tree) for tree in (model.initial, model.frozen, state)]
    objective, _ = method_of(config, trainer.base).objective(ProgressDisplay(enabled=False))
    step = make_step(model.forward(is_training=True), objective, model.combine, optimizer, 1.0)
    needed = step.lower(model.initial, model.frozen, state, batch, jax.random.key(0)).compile().memory_analysis()
    expected = needed.argument_size_in_bytes + needed.temp_size_in_bytes
    expected += needed.output_size_in_bytes - needed.alias_size_in_bytes
    computed, parts = expected - sum(held), found.total - found.trained - found.frozen - found.moments
    print(f"\n| {kind} | {sum(held) / 1e6:.1f} | {computed / 1e6:.1f} | {parts / 1e6:.1f} | {parts / computed:.2f} |")
    print({name: round(size / 1e6, 1) for name, size in dataclasses.asdict(found).items()})
    assert [found.trained, found.frozen, found.moments] == held
    assert 0.9 < found.total / expected < 1.3


@pytest.fixture
def plan(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    return lambda *args: CliRunner().invoke(app, ["plan", *map(str, args)])


def test_the_plan_of_a_training_says_whether_it_fits_and_what_each_device_holds(folder, tmp_path, plan, monkeypatch):
    path = tmp_path / "train.json"
    values = dataclasses.asdict(config_of("all weights", folder, tmp_path))
    path.write_text(json.dumps(values))
    result = plan("--train", path, "--on", "h100x8")
    assert result.exit_code == 0, result.output
    assert "h100x8, one device" in result.output
    assert "together: fits into" in result.output
    path.write_text(json.dumps({**values, "fsdp": {"enable_fsdp": True}}))
    [one, eight] = [
        json.loads(plan("--train", path, "--json", "--on", target).stdout)["training"][0]
        for target in ("h100x1", "h100x8")
    ]
    assert (one["num_devices"], eight["num_devices"]) == (1, 8)
    for part in ("trained_bytes", "moments_bytes", "gradients_bytes"):
        assert one[part] / 8 <= eight[part] < one[part] * 1.05 / 8
    assert eight["activations_bytes"] == one["activations_bytes"]
    monkeypatch.setattr("jaxis.engine.execution.cache_memory.host_bytes", lambda: 1 << 20)
    result = plan("--train", path)
    assert result.exit_code == 1
    assert "does not fit into" in result.output


def test_a_plan_needs_either_a_model_or_a_training(plan, tmp_path):
    config = tmp_path / "train.yaml"
    config.write_text("{}")
    for arguments, message in {
        (): "name a MODEL, or the file of a training with --train",
        ("--train", config, "--max-model-len", "64"): "--max-model-len cannot be honoured with --train",
        ("./model", "--train", config): "model cannot be honoured with --train",
    }.items():
        result = plan(*arguments)
        assert result.exit_code == 3
        assert message in result.output
