"""Streamed rows: which rows a step has, where a resumed run goes on, and what is in memory."""

import itertools
import json
import subprocess
import sys

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from jaxis.errors import ConfigError
from jaxis.host.progress import ProgressDisplay
from jaxis.training.data import StepContext
from jaxis.training.trainer import Trainer
from tests.support import training
from tests.support.hub_server import HubServer, client_environment
from tests.support.tiny_checkpoints import write_checkpoint

ROWS = [{"text": f"{number}: " + "word " * (number % 7 + 1)} for number in range(24)]
STREAM = {"stream": True}
PROGRESS = ProgressDisplay(enabled=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model") / "qwen3", "qwen3")


@pytest.fixture
def files(tmp_path):
    """A folder of rows 0 to 23, in files of each kind."""
    folder = tmp_path / "rows"
    folder.mkdir()
    training.write_rows(folder / "a.jsonl", ROWS[:9])
    (folder / "b.csv").write_text("text\n" + "".join(f"{row['text']}\n" for row in ROWS[9:14]))
    parquet.write_table(pyarrow.Table.from_pylist(ROWS[14:]), folder / "c.parquet", row_group_size=3)
    return folder


def trainer_of(model, folder, output, buffer=8, data=None, **settings):
    datasets = [{"dataset_path": str(folder), "shuffle_buffer_size": buffer}]
    data = {**STREAM, "datasets": datasets, **(data or {})}
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 12, **settings}
    return Trainer(training.train_config(model, folder, output, data=data, **settings), lambda _: None)


def drawn(trainer, step):
    """The batch of a step."""
    return trainer.data.draw(StepContext(step, lambda: None, lambda _: None, PROGRESS))[0]


def rows_of(trainer, batch):
    """The numbers of the rows that a batch of the embedded rows has."""
    texts = [trainer.base.tokenizer.decode(ids.tolist()) for ids in batch.ids.reshape(-1, batch.ids.shape[-1])]
    return [int(text.partition(":")[0]) for text in texts]


def same(first, second):
    return all(np.array_equal(value, second.arrays()[name]) for name, value in first.arrays().items())


def test_each_row_comes_once_before_one_comes_again_shuffled_within_the_buffer(model, files, tmp_path):
    trainer = trainer_of(model, files, tmp_path / "out")
    steps = [rows_of(trainer, drawn(trainer, step)) for step in range(12)]
    epochs = [[row for step in steps[first : first + 6] for row in step] for first in (0, 6)]
    assert [sorted(epoch) for epoch in epochs] == [[*range(24)]] * 2
    assert epochs[0] != epochs[1]
    # The windows of 8 rows are those of one order of the three files.
    files_in_order = itertools.permutations([range(9), range(9, 14), range(14, 24)])
    in_order = [[row for of_file in order for row in of_file] for order in files_in_order]
    for epoch in epochs:
        windows = [epoch[first : first + 8] for first in (0, 8, 16)]
        assert [sorted(each) for each in windows] in [
            [sorted(each[i : i + 8]) for i in (0, 8, 16)] for each in in_order
        ]
        assert all(each not in ([*one[i : i + 8]] for one in in_order for i in (0, 8, 16)) for each in windows)


def test_from_the_place_after_any_step_the_same_batches_follow(model, files, tmp_path):
    whole = trainer_of(model, files, tmp_path / "out")
    batches, places = [], []
    for step in range(12):
        batches.append(drawn(whole, step))
        places.append(json.loads(json.dumps(whole.data.place())))
    for step in range(1, 12):
        resumed = trainer_of(model, files, tmp_path / "out")
        resumed.data.go_to(places[step - 1])
        assert same(drawn(resumed, step), batches[step]), step


def test_a_mixture_has_its_proportions_on_average(model, tmp_path):
    datasets = [
        {
            "dataset_path": str(training.write_rows(tmp_path / f"{i}.jsonl", rows)),
            "mixture_proportion": share,
            "shuffle_buffer_size": 400,
        }
        for i, (rows, share) in enumerate([(ROWS[:5], 0.75), (ROWS[5:], 0.25)])
    ]
    trainer = trainer_of(model, tmp_path, tmp_path / "out", data={"datasets": datasets}, max_steps=500)
    rows = [row for step in range(100) for row in rows_of(trainer, drawn(trainer, step))]
    counts = np.bincount(rows, minlength=24)
    assert abs(counts[:5].sum() / 400 - 0.75) < 0.05
    assert np.ptp(counts[:5]) <= 1
    assert np.ptp(counts[5:]) <= 1


@pytest.mark.parametrize("trainer_type", ["TRL_SFT", "TRL_DPO"])
def test_a_buffer_larger_than_the_files_and_pairs_are_as_rows_in_memory(model, tmp_path, trainer_type):
    texts = [row["text"] for row in ROWS]
    pairs = [{"prompt": "Say.", "chosen": text, "rejected": text[::-1]} for text in texts]
    rows = training.write_rows(tmp_path / "rows.jsonl", pairs if trainer_type == "TRL_DPO" else ROWS)
    settings = {"trainer_type": trainer_type, "gradient_accumulation_steps": 12}
    found = drawn(trainer_of(model, rows, tmp_path / "out", buffer=24, **settings), 0)
    expected = drawn(trainer_of(model, rows, tmp_path / "out", data={"stream": False}, **settings), 0)

    def sequences(batch):
        ids, learned = (each.reshape(-1, each.shape[-1]) for each in (batch.ids, batch.learned))
        rows = enumerate(zip(ids, learned, batch.seq_lens.flat, strict=True))
        return sorted(
            (ids[:length].tolist(), learned[:length].tolist(), trainer_type == "TRL_DPO" and number // 2 % 2)
            for number, (ids, learned, length) in rows
        )

    assert sequences(found) == sequences(expected)


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([], r"rows\.jsonl has no rows"),
        ([{"text": ""}], r"rows\.jsonl, line 1: text is empty"),
        ([{"prompt": "a", "chosen": "b", "rejected": "c"}], "needs rows with what is learned"),
    ],
)
def test_a_first_row_that_cannot_be_learned_is_named_before_the_model_is_loaded(model, tmp_path, rows, named):
    path = training.write_rows(tmp_path / "rows.jsonl", rows)
    with pytest.raises(ConfigError, match=named) as caught:
        trainer_of(model, path, tmp_path / "out")
    assert "\n" not in str(caught.value)


_RUN = """
import json, sys
from pathlib import Path
from jaxis.training.run_log import MetricsFile
from tests.support import training

model, output = sys.argv[1:]
write = MetricsFile.write

class Killed(Exception):
    pass

def killing(self, values):
    if values["step"] == 6:
        raise Killed
    write(self, values)

def run(name, **data):
    config = training.train_config(
        Path(model), Path("rows"), Path(output) / name, max_steps=8, save_steps=3, try_resume_from_last_checkpoint=True,
        data={"stream": True, "datasets": [{"dataset_name": "org/shards", "shuffle_buffer_size": 4}]})
    _, lines = training.run(config)
    return lines

run("whole")
MetricsFile.write = killing
try:
    run("killed")
except Killed:
    MetricsFile.write = write
lines = run("killed")
found = [(Path(output) / name / "model.safetensors").read_bytes() for name in ("whole", "killed")]
losses = [training.metrics(Path(output) / name) for name in ("whole", "killed")]
goes_on = sum("checkpoint-3, step 3 of 8" in each for each in lines)
print(json.dumps([found[0] == found[1], losses[0] == losses[1], goes_on]))
"""


def test_a_run_from_the_hub_that_was_killed_ends_as_one_that_was_not(model, tmp_path):
    shards = {}
    for i in range(6):
        path = training.write_rows(tmp_path / "shard.jsonl", ROWS[i * 4 : i * 4 + 4])
        shards[f"data/train-0000{i}-of-00006.jsonl"] = path.read_bytes()
    hub = HubServer({"org/shards": {"main": shards}})
    try:
        process = subprocess.run(
            [sys.executable, "-c", _RUN, str(model), str(tmp_path)],
            env=client_environment(tmp_path / "cache", HF_ENDPOINT=hub.url),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert process.returncode == 0, process.stderr
        assert json.loads(process.stdout.splitlines()[-1]) == [True, True, 1]
        # 8 steps of 2 rows have read the 4 rows of 4 shards; the others were not downloaded.
        assert len({each for each in hub.requests if "resolve" in each and each.startswith("GET")}) == 4
    finally:
        hub.close()
