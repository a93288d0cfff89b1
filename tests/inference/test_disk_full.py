"""A disk that fills up: one line, finished rows are kept, and the same command goes on when there is room."""

import contextlib
import json
import os
import subprocess
import sys

import pytest

from jaxis.errors import EngineError
from jaxis.inference.journal import RowResult
from jaxis.inference.run import StreamSink

# A limit on the size of files stands in for a full disk: writes fail half-way through a line.
COMMAND = """
import resource, signal, sys
limit = int(sys.argv.pop(1))
if limit:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
from jaxis.cli.main import main
main()
"""
NUM_ROWS = 12


@pytest.fixture
def run():
    """Runs the command with files of a limited size, 0 being no limit; returns the finished process."""

    def command(limit, *arguments):
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        if limit:  # what is compiled must not meet it, neither programs nor jaxis's sources
            environment |= {"JAX_ENABLE_COMPILATION_CACHE": "false", "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-c", COMMAND, str(limit), *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)

    return command


def write_conversations(path):
    rows = [{"messages": [{"role": "user", "content": f"What is {i} + 2?"}]} for i in range(NUM_ROWS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_requests(path):
    rows = []
    for i in range(NUM_ROWS):
        body = {"messages": [{"role": "user", "content": f"What is {i} + 2?"}], "max_tokens": 24}
        rows.append({"custom_id": f"r{i}", "method": "POST", "url": "/v1/chat/completions", "body": body})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("write", "arguments"),
    [
        (write_conversations, ["infer", "--input_path", "--output_path"]),
        (write_requests, ["run-batch", "-i", "-o"]),
    ],
)
def test_a_full_disk_loses_nothing(tmp_path, run, write, arguments):
    source, output = tmp_path / "input.jsonl", tmp_path / "output.jsonl"
    write(source)
    name, source_option, output_option = arguments
    command = [name, source_option, source, output_option, output]
    failed = run(4000, *command)
    assert failed.returncode == 1
    assert "cannot be written: File too large; finished rows are kept" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert not output.exists()
    resumed = run(0, *command)
    assert resumed.returncode == 0, resumed.stderr
    assert "going on after" in resumed.stderr
    lines = [json.loads(line) for line in output.open()]
    assert len(lines) == NUM_ROWS
    if name == "run-batch":
        assert [line["custom_id"] for line in lines] == [f"r{i}" for i in range(NUM_ROWS)]
    else:
        assert [line["messages"][0]["content"] for line in lines] == [f"What is {i} + 2?" for i in range(NUM_ROWS)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["input.jsonl", "output.jsonl"]


def test_a_full_stdout_is_one_error():
    full_is_said = pytest.raises(EngineError, match="the output cannot be written: No space left on device")
    with open("/dev/full", "wb", buffering=0) as full, contextlib.closing(StreamSink(full, 1)) as sink, full_is_said:
        sink.append([RowResult(0, "completed", {})])
