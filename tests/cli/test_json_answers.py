"""Answers of commands with --json are as their schemas describe them, whatever happens."""

import dataclasses
import json
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner

from jaxis.cli.main import app
from jaxis.doctor import examination
from jaxis.doctor.check import Case
from jaxis.host.json_object import json_object_text
from tests.support import training
from tests.support.places import REPOSITORY
from tests.support.tiny_checkpoints import write_checkpoint
from tools.json_schemas import FOLDER, schemas

TINY = str(REPOSITORY / "src" / "jaxis" / "assets" / "tiny")


def checked(name, *arguments):
    """(Exit code, status) of a command, whose answer is as the schema `name` says."""
    found = CliRunner().invoke(app, [*arguments, "--json"])
    answer = json.loads(found.stdout)
    jsonschema.validate(answer, json.loads((FOLDER / f"{name}.json").read_text()))
    return found.exit_code, answer["status"]


def test_schemas_are_what_the_dataclasses_say():
    files = {path.stem: path.read_text() for path in FOLDER.glob("*.json")}
    assert files == schemas(), "run python -m tools.json_schemas"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("analyze", ("analyze", "missing")),
        ("verify", ("verify", "missing")),
        ("verify-against", ("verify", TINY, "--against", "http://127.0.0.1:9")),
        ("convert", ("convert", "missing", "there", "--to", "orbax")),
        ("report", ("report", "missing")),
        ("new-model", ("new-model", "Falcon4", "--like", "lama")),
        ("plan", ("plan", "missing", "--on", "v6e-1")),
        ("plan-this", ("plan", "missing", "--on", "this")),
        ("plan-train", ("plan", "--train", "missing.yaml")),
        ("quantize", ("quantize", "missing", "there")),
        ("train", ("train", "--check", "-c", "missing.yaml")),
        ("doctor", ("doctor", "--output", "a_file")),
    ],
)
def test_an_error_is_an_object_and_exit_code_3(name, arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(examination, "_cases", lambda: iter(()))
    (tmp_path / "a_file").touch()
    assert checked(name, *arguments) == (3, "error")


@pytest.mark.parametrize("name", sorted({*schemas()} - {"plan-this", "plan-train", "verify-against"}))
def test_wrong_usage_is_an_object_too(name):
    assert checked(name, name, "a", "b", "c", "--revision") == (2, "error")


def test_an_exception_that_nobody_expected_is_an_object_too(monkeypatch):
    monkeypatch.setattr("jaxis.bringup.analyze.analysis.analyze", lambda *_, **__: 1 // 0)
    assert checked("analyze", "analyze", TINY) == (3, "error")


def test_what_json_lacks_is_a_string():
    assert json.loads(json_object_text({"error": float("nan"), "of": [float("-inf")]}), parse_constant=pytest.fail) == {
        "error": "NaN",
        "of": ["-Infinity"],
    }


def test_answers(tmp_path, monkeypatch):
    assert checked("analyze", "analyze", TINY) == (0, "can_run")
    unknown = tmp_path / "config.json"
    unknown.write_text(
        json.dumps(json.loads(Path(TINY, "config.json").read_text()) | {"architectures": ["OddForCausalLM"]})
    )
    assert checked("analyze", "analyze", str(unknown)) == (1, "cannot_run")
    assert checked("plan", "plan", TINY, "--on", "v6e-1") == (0, "fits")
    monkeypatch.setattr(examination, "_cases", lambda: iter([Case("kernels", "good", lambda: "fine")]))
    assert checked("doctor", "doctor", "--output", str(tmp_path / "doctor")) == (0, "passed")
    assert checked("convert", "convert", TINY, str(tmp_path / "orbax"), "--to", "orbax") == (0, "converted")
    for file in ("src/jaxis/models/architectures.json", "tests/data/families.yaml"):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text((REPOSITORY / file).read_text())
    monkeypatch.chdir(tmp_path)
    assert checked("new-model", "new-model", "Falcon4", "--like", "qwen3") == (0, "written")


def test_answers_of_quantize_and_training(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "qwen3")
    text = tmp_path / "text.txt"
    text.write_text("one two three four " * 20)
    quantized = str(tmp_path / "int8")
    assert checked("quantize", "quantize", str(folder), quantized) == (0, "written")
    assert checked("quantize", "quantize", str(folder), quantized, "--evaluate", str(text)) == (0, "evaluated")
    rows = training.write_rows(tmp_path / "rows.jsonl", [training.dialogue("Count.", "one two")] * 4)
    file = tmp_path / "train.json"
    file.write_text(json.dumps(dataclasses.asdict(training.train_config(folder, rows, tmp_path / "out"))))
    assert checked("train", "train", "--check", "-c", str(file)) == (0, "ready")
    assert checked("plan-train", "plan", "--train", str(file), "--on", "h100x1") == (0, "fits")


@pytest.mark.slow
def test_answers_of_verify_and_report(tmp_path):
    config = str(Path(TINY, "config.json"))
    assert checked("verify", "verify", config) == (0, "verified")
    code, status = checked("report", "report", config, "--output", str(tmp_path))
    assert (code, status) in ((0, "passed"), (1, "failed"))
