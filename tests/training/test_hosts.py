"""A training shared by two hosts, each a process with four devices, is that of one device, whatever happens to them."""

import contextlib
import dataclasses
import json
import re
import shutil

import numpy as np
import pytest

from tests.support import training
from tests.support.host_processes import HostProcess, free_port
from tests.support.tiny_checkpoints import write_checkpoint
from tests.support.waiting import wait_until

pytestmark = pytest.mark.multi_device
NUM_HOSTS, OF_HOST, OF_LAYER = 2, 4, 2
DIALOGUES = [training.dialogue(f"What comes after {n}?", "Next is " + f"{n + 1} " * (1 + n % 5)) for n in range(40)]
PAIRS = [
    {"prompt": f"{n} and one?", "chosen": f"That makes {n + 1}.", "rejected": f"{n}, " * (1 + n % 4)} for n in range(20)
]
KINDS = {
    "all weights": {"data": {"pack": True}},
    "adapters": {"peft": {"lora_r": 8, "lora_dropout": 0.1}, "gradient_accumulation_steps": 2},
    "preferences": {"trainer_type": "TRL_DPO"},
    "streamed rows": {"data": {"stream": True}},
}
ROWS = 8


def config_of(tmp_path, output, *, hosts=True, **settings):
    """A run of a step's batch that does not depend on the number of devices, and the file of its configuration."""
    folder = tmp_path / "model"
    if not folder.exists():
        write_checkpoint(folder, "qwen3")
    rows = PAIRS if "trainer_type" in settings else DIALOGUES
    files = [training.write_rows(tmp_path / f"{part}.jsonl", of) for part, of in (("rows", rows), ("held", rows[:9]))]
    size = ROWS * OF_LAYER // (NUM_HOSTS * OF_HOST) if hosts else ROWS
    settings = {"max_steps": 4, "save_steps": 2, "learning_rate": 1e-3, "eval_strategy": "steps", **settings}
    config = training.train_config(
        *(folder, files[0], settings.pop("output_dir", tmp_path / output)),
        validation=files[1],
        fsdp=OF_LAYER if hosts else 0,
        **{"eval_steps": 2, "per_device_train_batch_size": size, "per_device_eval_batch_size": size, **settings},
    )
    path = tmp_path / f"{output}.json"
    path.write_text(json.dumps(dataclasses.asdict(config)))
    return config, path


def by_slurm(rank):
    """Variables of a process that Slurm has started."""
    number = 100_000 + (free_port() if rank == 0 else 0)
    names = {"JOB_ID": number, "STEP_NODELIST": "127.0.0.1", "NTASKS": NUM_HOSTS, "PROCID": rank, "LOCALID": rank}
    return {f"SLURM_{name}": str(value) for name, value in names.items()}


@contextlib.contextmanager
def hosts_of(path, *others, slurm=False):
    """Starts the hosts of a training, in folders of their own; `others` are more arguments of host 1."""
    port = str(free_port())
    variables = by_slurm(0) if slurm else {}
    started = []
    try:
        for rank in range(NUM_HOSTS):
            place = ["--cluster"] if slurm else ["--nnodes", "2", "--node-rank", str(rank), "--master-port", port]
            (own := path.parent / f"host-{rank}").mkdir(exist_ok=True)
            script = f"import os; os.chdir({str(own)!r}); from jaxis.cli.main import main; main()"
            command = ["-c", script, "train", "-c", str(path), *place]
            given = {**variables, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} if slurm else {}
            started.append(HostProcess([*command, *(others if rank else ())], num_devices=OF_HOST, **given))
        yield started
    finally:
        for host in started:
            host.end()


def run(path, **options):
    with hosts_of(path, **options) as hosts:
        codes = [host.wait(300) for host in hosts]
        assert codes == [0] * NUM_HOSTS, "\n".join(host.output for host in hosts)
        return [host.output for host in hosts]


def lines_of(output):
    """The lines of a host, without that of the beginning, and Gloo's of its connections, which may be cut."""
    return [
        line for line in output.splitlines() if not re.search(r"waiting for|peer ranks", line) and line != "[Gloo] "
    ]


def losses(output):
    return [line.get("loss", line.get("eval_loss")) for line in training.metrics(output)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_hosts_train_as_one_device_does_and_one_device_goes_on_from_them(kind, tmp_path):
    training.run(config_of(tmp_path, "one", hosts=False, **KINDS[kind])[0])
    _, path = config_of(tmp_path, "two", **KINDS[kind])
    first, second = run(path)
    assert "4 steps done" in first
    assert lines_of(second) == []
    expected, found = losses(tmp_path / "one"), losses(tmp_path / "two")
    print(f"\n| {kind} | {', '.join(f'{error:.1e}' for error in np.abs(np.divide(found, expected) - 1))} |")
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    shutil.rmtree(tmp_path / "two" / "checkpoint-4")
    resumed, _ = config_of(tmp_path, "two", hosts=False, try_resume_from_last_checkpoint=True, **KINDS[kind])
    _, lines = training.run(resumed)
    assert any("checkpoint-2, step 2 of 4" in line for line in lines)
    np.testing.assert_allclose(losses(tmp_path / "two"), expected, rtol=1e-5)


@pytest.mark.slow
def test_hosts_that_were_killed_go_on_to_the_same_bytes(tmp_path):
    settings = {"max_steps": 16}
    run(config_of(tmp_path, "whole", **settings)[1])
    _, path = config_of(tmp_path, "killed", try_resume_from_last_checkpoint=True, **settings)
    output = tmp_path / "killed"
    with hosts_of(path) as hosts:
        wait_until((output / "checkpoint-4").exists, 300)
        hosts[1].process.kill()
        assert hosts[0].wait(60) == 1
        assert re.search(r"^error: host 1 \(.*\) has ended", hosts[0].output, re.MULTILINE), hosts[0].output
        assert "Traceback" not in hosts[0].output
    with hosts_of(path) as hosts:
        wait_until((output / "checkpoint-8").exists, 300)
        for host in hosts:
            host.process.kill()
    first, _ = run(path, slurm=True)
    assert "going on from" in first
    assert losses(output) == losses(tmp_path / "whole")
    model = "model.safetensors"
    assert (output / model).read_bytes() == (tmp_path / "whole" / model).read_bytes()


@pytest.mark.slow
def test_host_1_ends_when_host_0_is_killed(tmp_path):
    _, path = config_of(tmp_path, "out", max_steps=1000)
    with hosts_of(path) as hosts:
        wait_until((tmp_path / "out" / "checkpoint-2").exists, 300)
        hosts[0].process.kill()
        assert hosts[1].wait(60) != 0


@pytest.mark.parametrize(
    ("others", "of_first", "of_second"),
    [
        (
            ["--training.learning_rate", "0.5"],
            r"error: training\.learning_rate is '0\.5' on host 1 \(.*\), and '0\.001' on host 0: all hosts need the",
            r"error: host 0: training\.learning_rate is '0\.5'",
        ),
        pytest.param(
            ["--data.train.datasets", "[{dataset_path: /none/rows.jsonl}]"],
            r"error: host 1 \(.*\) cannot start: .*/none/rows\.jsonl",
            r"error: .*/none/rows\.jsonl",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--training.trainer_type", "TRL_DISTILLATION"],
            r"error: host 1 \(.*\) cannot start: training\.trainer_type=TRL_DISTILLATION cannot be honoured on several",
            r"error: training\.trainer_type=TRL_DISTILLATION cannot be honoured on several hosts: train on one$",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            [],
            r"error: host 1 \(.*\) has failed: training\.output_dir='out' is not host 0's: give a folder that all",
            r"error: training\.output_dir='out' is not host 0's",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["another configuration", "no data", "distillation", "a folder of its own"],
)
def test_hosts_that_differ_end_with_one_line_each(others, of_first, of_second, tmp_path):
    _, path = config_of(tmp_path, "out", output_dir="out")
    with hosts_of(path, *others) as hosts:
        assert [host.wait() for host in hosts] == [1, 1], "\n".join(host.output for host in hosts)
        lines = [lines_of(host.output) for host in hosts]
    assert [len(each) for each in lines] == [1, 1], lines
    assert re.match(of_first, lines[0][0])
    assert re.match(of_second, lines[1][0])
