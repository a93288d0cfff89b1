"""A run that is killed at any moment, any number of times, ends in the output of one that was not."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

# Every row that an engine is given is noted, so that a row computed twice shows.
COMMAND = """
import os, sys
from jaxis.engine.engine import LLMEngine
log = os.open(sys.argv.pop(1), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
add_request = LLMEngine.add_request
def add_and_note(self, request_id, *args, **kwargs):
    os.write(log, (request_id.removeprefix("row-") + "\\n").encode())
    return add_request(self, request_id, *args, **kwargs)
LLMEngine.add_request = add_and_note
from jaxis.cli.main import main
main()
"""
NUM_ROWS = 40
SAMPLED = (
    *("--generation.temperature", "0.9", "--generation.max_new_tokens", "12"),
    *("--model.model_kwargs.max_num_seqs", "3", "--model.model_kwargs.kv_cache_memory", "8MiB"),
)


def conversations(path):
    rows = [{"messages": [{"role": "user", "content": f"What is {i} + {i * 7 % 10}?"}]} for i in range(NUM_ROWS)]
    rows[17] = {"messages": "broken"}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def requests(path):
    rows = []
    for i in range(NUM_ROWS):
        body = {"messages": [{"role": "user", "content": f"What is {i} + 2?"}], "max_tokens": 24, "temperature": 0.9}
        rows.append({"custom_id": f"r{i}", "method": "POST", "url": "/v1/chat/completions", "body": body})
    rows[17]["body"] = {"messages": "broken"}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


class Runs:
    """Starts runs towards one output, and reads what they left."""

    def __init__(self, folder, arguments):
        folder.mkdir()
        self.output = folder / "output.jsonl"
        self.log = folder.parent / f"{folder.name}.log"
        self.arguments = arguments

    def start(self):
        self.log.unlink(missing_ok=True)
        command = [sys.executable, "-c", COMMAND, str(self.log), *self.arguments(self.output)]
        return subprocess.Popen(command, stderr=subprocess.PIPE, env={**os.environ, "JAX_PLATFORMS": "cpu"})

    def submitted(self):
        """Numbers of the rows that the last process gave to its engine."""
        return [int(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []

    def kept(self):
        """Numbers of the rows in the scratch file, in whole lines."""
        data = b""
        for path in self.output.parent.glob("*.scratch"):
            with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
                data += path.read_bytes()
        return [int(line.split()[1]) for line in data.split(b"\n")[:-1]]

    def kill_when_kept(self, process, num_rows, delay):
        deadline = time.monotonic() + 90
        while process.poll() is None and len(self.kept()) < num_rows and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.communicate()


def assert_kills_change_nothing(tmp_path, arguments, num_kills, comparable, seed=0):
    undisturbed = Runs(tmp_path / "undisturbed", arguments)
    process = undisturbed.start()
    assert process.wait(120) == 0, process.stderr.read()
    assert sorted(undisturbed.submitted()) == [i for i in range(NUM_ROWS) if i != 17]

    rng = random.Random(seed)
    disturbed = Runs(tmp_path / "disturbed", arguments)
    kept, num_halfway = [], 0
    for i in range(num_kills):
        process = disturbed.start()
        target = len(kept) + rng.randint(0, (1 + (num_kills > 1)) * (NUM_ROWS - len(kept)) // (num_kills - i))
        disturbed.kill_when_kept(process, target, rng.uniform(0, 0.02))
        assert not set(disturbed.submitted()) & set(kept), "a finished row was computed again"
        if disturbed.output.exists():
            break  # it was quicker than its killer
        now = disturbed.kept()
        assert now[: len(kept)] == kept, "a finished row was lost"
        assert len(set(now)) == len(now)
        kept = now
        num_halfway += 0 < len(kept) < NUM_ROWS
    else:
        process = disturbed.start()
        assert process.wait(120) == 0, process.stderr.read()
        assert sorted({*disturbed.submitted(), *kept, 17}) == list(range(NUM_ROWS))
        assert not set(disturbed.submitted()) & set(kept)
    assert num_halfway, "no kill came while rows were running"
    assert [path.name for path in disturbed.output.parent.iterdir()] == ["output.jsonl"]
    assert comparable(disturbed.output) == comparable(undisturbed.output)


def without_times(path):
    rows = [json.loads(line) for line in path.open()]
    for row in rows:
        row["response"]["body"].pop("created", None)
        row["response"]["body"].get("usage", {}).pop("prompt_tokens_details", None)
    return rows


@pytest.mark.parametrize(("num_kills", "seed"), [(1, 0), (40, 1)])
def test_infer_loses_and_repeats_nothing(one_layer, tmp_path, num_kills, seed):
    conversations(tmp_path / "input.jsonl")

    def arguments(output):
        paths = ("--input_path", str(tmp_path / "input.jsonl"), "--output_path", str(output))
        return ("infer", "--model.model_name", str(one_layer), *paths, *SAMPLED, "--model.model_kwargs.seed", str(seed))

    assert_kills_change_nothing(tmp_path, arguments, num_kills, lambda path: path.read_bytes(), seed)


def test_run_batch_loses_and_repeats_nothing(tmp_path):
    requests(tmp_path / "input.jsonl")

    def arguments(output):
        return ("run-batch", "-i", str(tmp_path / "input.jsonl"), "-o", str(output), "--max-num-seqs", "3")

    assert_kills_change_nothing(tmp_path, arguments, 2, without_times)
