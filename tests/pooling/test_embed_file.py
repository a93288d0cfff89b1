"""`jaxis embed`: the vectors of a file are those of `LLM.embed`, and no kill, at any moment, changes the file."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from typer.testing import CliRunner

from jaxis import LLM
from jaxis.cli.main import app
from tests.support.encoder_checkpoints import save_model, save_pooling, texts

STEPS = ("--max-num-batched-tokens", "64", "--max-num-seqs", "2")  # rows are kept eight at a time


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder")
    save_model(folder)
    save_pooling(folder, max_seq_length=62)
    return folder


@pytest.fixture(scope="module")
def expected(folder):
    with LLM(folder, show_progress=False) as llm:
        return np.array([output.outputs.embedding for output in llm.embed(texts())], np.float32)


def words(token_ids):
    return " ".join(f"w{token_id - 5}" for token_id in token_ids[1:-1])


def rows():
    """The texts in each form that a line may have."""
    forms = (
        lambda i, ids: {"id": f"r{i}", "text": words(ids)},
        lambda i, ids: {"input": words(ids), "pages": [i]},
        lambda _, ids: words(ids),
        lambda _, ids: {"input": ids},
    )
    return [forms[i % 4](i, ids) for i, ids in enumerate(texts())]


def write(path, values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def invoke(*arguments, stdin=None):
    return CliRunner().invoke(app, ["embed", *map(str, arguments)], input=stdin)


def test_a_file_has_the_vectors_of_its_texts(folder, expected, tmp_path):
    source = write(tmp_path / "in.jsonl", rows())
    result = invoke(folder, source, "-o", tmp_path / "out.jsonl", *STEPS)
    assert (result.exit_code, result.stdout) == (0, ""), result.output
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").open()]
    np.testing.assert_array_equal(np.array([answer.pop("embedding") for answer in answers], np.float32), expected)
    assert answers[:4] == [{"id": "r0"}, {"pages": [1]}, {}, {}]

    shorter = ("--dimensions", "16", "--hf-overrides", '{"is_matryoshka": true}')
    result = invoke(folder, source, "-o", tmp_path / "out.npy", *shorter)
    assert result.exit_code == 0, result.output
    lengths = np.linalg.norm(expected[:, :16], axis=1, keepdims=True)
    array = np.load(tmp_path / "out.npy")
    assert array.dtype == np.float32
    np.testing.assert_array_equal(array, expected[:, :16] / lengths)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "out.npy"]

    piped = invoke(folder, "-", stdin=source.read_text())
    assert piped.stdout == (tmp_path / "out.jsonl").read_text()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("broken", "line 3: the row is not JSON"),
        ("[1]", "line 3: the row is not a JSON object"),
        ('{"id": 1}', 'line 3, needs either "text" or "input"'),
        ('{"text": "w1", "input": "w1"}', 'line 3, needs either "text" or "input"'),
        ('{"text": 1}', 'line 3, has no string, and no list of token ids, as its "text"'),
        ('{"text": "w1", "embedding": []}', 'line 3, already has "embedding"'),
        ('""', "line 3, is empty"),
        (json.dumps("w1 " * 61), "line 3, has 63 tokens, more than the 62"),
    ],
)
def test_each_line_is_checked_before_anything_is_computed(folder, tmp_path, monkeypatch, line, message):
    monkeypatch.setattr("jaxis.pooling.pooling_model.PoolingModel.embed", lambda *_: pytest.fail("it was computed"))
    source = tmp_path / "in.jsonl"
    source.write_text(f'"w1"\n\n{line}\n')
    result = invoke(folder, source, "-o", tmp_path / "out.jsonl")
    assert result.exit_code == 1
    assert f"{source}, {message}" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_other_mistakes_are_one_line(folder, tmp_path):
    source = write(tmp_path / "in.jsonl", ["w1"])
    for arguments, message in (
        ((folder, source, "-o", source), "is the input"),
        ((folder, tmp_path / "none.jsonl"), "cannot be read"),
        ((folder, source, "--prompt-name", "query"), "no prompt for texts of kind 'query'"),
        ((folder, source, "--runner", "generate"), "was made to generate"),
        ((folder, source, "--dimensions", "16"), "dimensions=16 cannot be honoured"),
    ):
        result = invoke(*arguments)
        assert result.exit_code == 1
        assert message in result.stderr
    assert source.read_text() == '"w1"\n'


# Notes the texts of each computation, so that one that is computed twice shows; and is slow enough to be killed.
COMMAND = """
import os, sys, time
from jaxis.pooling.pooling_model import PoolingModel
log = os.open(sys.argv.pop(1), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
compute = PoolingModel.embed
def compute_and_note(self, texts, starts):
    os.write(log, "".join(" ".join(map(str, text)) + "\\n" for text in texts).encode())
    time.sleep(0.05)
    return compute(self, texts, starts)
PoolingModel.embed = compute_and_note
from jaxis.cli.main import main
main()
"""


def kept_rows(output):
    data = b"".join(path.read_bytes() for path in output.parent.glob(f"{output.name}.*.scratch"))
    return [int(line.split()[1]) for line in data.split(b"\n")[:-1]]


@pytest.mark.parametrize("num_kills", [1, 3])
def test_kills_change_nothing_and_what_changed_is_refused(folder, expected, tmp_path, num_kills):
    source, output, log = write(tmp_path / "in.jsonl", rows()), tmp_path / "out.npy", tmp_path / "log"
    command = [sys.executable, "-c", COMMAND, str(log), "embed", str(folder), str(source), "-o", str(output), *STEPS]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    kept = []
    for _ in range(num_kills):
        process = subprocess.Popen(command, stderr=subprocess.PIPE, env=environment)
        while process.poll() is None and len(kept_rows(output)) < len(kept) + 8:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert kept_rows(output)[: len(kept)] == kept
        assert len(kept) < len(kept_rows(output)) < len(expected), "no kill came between rows"
        kept = kept_rows(output)
        assert not output.exists()

    write(tmp_path / "other.jsonl", [*rows()[:-1], "w1"])
    for changed, named in (
        ((folder, tmp_path / "other.jsonl", "-o", output, *STEPS), "another input:"),
        ((folder, source, "-o", output, "--quantization", "int8", *STEPS), "another model or its options:"),
        ((folder, source, "-o", output, "--truncate-prompt-tokens", "9"), "another prompt_name, truncate"),
    ):
        refused = invoke(*changed)
        assert refused.exit_code == 1
        assert named in refused.stderr
    assert kept_rows(output) == kept

    log.unlink()
    finished = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert finished.returncode == 0, finished.stderr
    assert f"going on after {len(kept)} of {len(expected)} rows" in finished.stderr
    wanted = [" ".join(map(str, token_ids)) for i, token_ids in enumerate(texts()) if i not in kept]
    assert log.read_text().splitlines() == wanted
    np.testing.assert_array_equal(np.load(output), expected)
    assert not list(tmp_path.glob("*.scratch"))
