"""A training that eight devices share is that of one."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxis.errors import ConfigError
from tests.support import training
from tests.support.quick_rows import quick_rows
from tests.support.simulated_devices import run_on_devices
from tests.support.tiny_checkpoints import DELTA_NET_SIZES, GPT_OSS_SIZES, write_checkpoint

pytestmark = pytest.mark.multi_device
NUM_DEVICES = 8
DIALOGUES = [training.dialogue(f"What comes after {n}?", "Next is " + f"{n + 1} " * (1 + n % 5)) for n in range(40)]
PAIRS = [
    {"prompt": f"{n} and one?", "chosen": f"That makes {n + 1}.", "rejected": f"{n}, " * (1 + n % 4)} for n in range(20)
]
SIZES = {
    "gpt_oss": GPT_OSS_SIZES,
    "qwen3_5_text": DELTA_NET_SIZES,
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40},
}
KINDS = {
    "all weights": ("qwen3", {"enable_gradient_checkpointing": True}),
    "layers kept": ("qwen3", {"optimizer": "sgd", "gradient_accumulation_steps": 2}),
    "packed": ("qwen3", {"data": {"pack": True}}),
    "sinks and windows": ("gpt_oss", {"optimizer": "sgd"}),
    "experts": ("qwen3_moe", {"model_kwargs": {"output_router_logits": True, "router_aux_loss_coef": 0.1}}),
    "states": ("qwen3_5_text", {"learning_rate": 1e-4}),
    "adapters": ("qwen3", {"peft": {"lora_r": 8, "lora_dropout": 0.1}}),
    "rounded weights": ("qwen3", {"peft": {"lora_r": 8, "q_lora": True, "q_lora_bits": 8}}),
    "preferences": ("qwen3", {"trainer_type": "TRL_DPO"}),
    "preferences, adapters": (
        "qwen3",
        {"trainer_type": "TRL_DPO", "peft": {"lora_r": 8, "lora_dropout": 0.1}},
    ),
}


def config_of(kind, tmp_path, output, num_devices, *, of_layer=1, **changes):
    """A run of a step's batch that does not depend on the number of devices, of which `of_layer` share a layer."""
    name, settings = KINDS[kind]
    settings = {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 8, **settings, **changes}
    for size in ("per_device_train_batch_size", "per_device_eval_batch_size"):
        settings[size] = -(-settings[size] * of_layer // num_devices)
    folder = tmp_path / "model"
    if not folder.exists():
        write_checkpoint(folder, name, **SIZES.get(name, {}))
    rows = PAIRS if "trainer_type" in settings else DIALOGUES
    files = [training.write_rows(tmp_path / f"{part}.jsonl", of) for part, of in (("rows", rows), ("held", rows[:9]))]
    return training.train_config(
        folder,
        files[0],
        tmp_path / output,
        validation=files[1],
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        fsdp=of_layer if num_devices > 1 else 0,
        **{"max_steps": 4, "learning_rate": 1e-3, **settings},
    )


def run_sharded(config, tmp_path, num_devices=NUM_DEVICES):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(dataclasses.asdict(config)))
    return json.loads(
        run_on_devices("-m", "tests.training.sharded_training", str(path), num_devices=num_devices).splitlines()[-1]
    )


def losses(output):
    return [line.get("loss", line.get("eval_loss")) for line in training.metrics(output)]


@pytest.mark.slow
@pytest.mark.parametrize("of_layer", [1, 4])
@pytest.mark.parametrize("kind", quick_rows(KINDS, ["all weights"]))
def test_losses_are_those_of_one_device_and_each_device_holds_its_share(kind, of_layer, tmp_path):
    training.run(config_of(kind, tmp_path, "one", 1))
    sharded = run_sharded(config_of(kind, tmp_path, "eight", NUM_DEVICES, of_layer=of_layer), tmp_path)
    expected, found = losses(tmp_path / "one"), losses(tmp_path / "eight")
    assert len(found) == 6
    errors = np.abs(np.divide(found, expected) - 1)
    print(f"\n| {kind} | {', '.join(f'{error:.1e}' for error in errors)} | {sharded['share']:.4f} |")
    # One device multiplies by rounded weights otherwise than several do; the difference has not been traced.
    assert errors.max() < (1e-3 if kind == "rounded weights" else 1e-5)
    assert sharded["devices"] == NUM_DEVICES
    # Adapters are small: all devices of a layer have them.
    assert sharded["share"] < 1.05 / NUM_DEVICES * (of_layer if "peft" in KINDS[kind][1] else 1)


IN_STAGES = """
from unittest import mock
import jax, numpy as np
from jax.sharding import PartitionSpec
from jaxis.parallel.mesh import DATA_AXIS, make_mesh
from jaxis.training import sharding

arrays = np.random.default_rng(0).integers(-9, 9, (32, 64, 32)).astype(np.float32)
for axis in (0, 1):
    def gradient(array):
        part = np.ones((2, 32) if axis == 0 else (64, 1), np.float32)
        shard = sharding.DevicePart(part, axis)
        return jax.grad(lambda shard: (sharding.whole(shard) ** 2 * array[0] / 2).sum())(shard).part
    divided = PartitionSpec(*[None] * axis, DATA_AXIS)
    mesh = make_mesh(data_parallel_size=32)
    summed = jax.shard_map(gradient, mesh=mesh, in_specs=PartitionSpec(DATA_AXIS), out_specs=divided, check_vma=False)
    with mock.patch.object(sharding, "target_platform", lambda: "tpu"):
        text = jax.jit(summed).lower(arrays).as_text()
        np.testing.assert_array_equal(jax.jit(summed)(arrays), arrays.sum(0))
    print(*(text.count(f'"stablehlo.{name}"') for name in ("all_gather", "reduce_scatter")))
"""


def test_many_tpus_gather_and_sum_in_stages():
    assert run_on_devices("-c", IN_STAGES, num_devices=32).split() == ["3", "3"] * 2


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_devices(tmp_path):
    training.run(config_of("all weights", tmp_path, "one", 1))
    run_sharded(config_of("all weights", tmp_path, "changing", 8), tmp_path)
    shutil.rmtree(tmp_path / "changing" / "checkpoint-4")
    resume = {"try_resume_from_last_checkpoint": True}
    changed = config_of("all weights", tmp_path, "changing", 4, **resume)
    lines = run_sharded(changed, tmp_path, num_devices=4)["lines"]
    assert any("going on from" in line for line in lines)
    np.testing.assert_allclose(losses(tmp_path / "changing"), losses(tmp_path / "one"), rtol=1e-5)
    shutil.rmtree(tmp_path / "changing" / "checkpoint-4")
    training.run(config_of("all weights", tmp_path, "changing", 1, **resume))
    expected, found = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "changing"))
    for name, tensor in expected.items():
        np.testing.assert_allclose(found[name], tensor, rtol=1e-4, atol=1e-4 * np.abs(tensor).max())
    shutil.rmtree(tmp_path / "changing" / "checkpoint-4")
    other = config_of("all weights", tmp_path, "changing", 1, per_device_train_batch_size=4, **resume)
    with pytest.raises(ConfigError, match="per_device_train_batch_size times the number of data ranks=8"):
        training.run(other)
