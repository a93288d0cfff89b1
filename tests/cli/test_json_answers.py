"""Answers of commands with --json are as their schemas describe them, whatever happens."""

import json
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner

from jaxis.cli.main import app
from tests.support.places import REPOSITORY
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
    ],
)
def test_an_error_is_an_object_and_exit_code_3(name, arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert checked(name, *arguments) == (3, "error")


def test_answers(tmp_path, monkeypatch):
    assert checked("analyze", "analyze", TINY) == (0, "can_run")
    unknown = tmp_path / "config.json"
    unknown.write_text(
        json.dumps(json.loads(Path(TINY, "config.json").read_text()) | {"architectures": ["OddForCausalLM"]})
    )
    assert checked("analyze", "analyze", str(unknown)) == (1, "cannot_run")
    assert checked("convert", "convert", TINY, str(tmp_path / "orbax"), "--to", "orbax") == (0, "converted")
    for file in ("src/jaxis/models/architectures.json", "tests/data/families.yaml"):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text((REPOSITORY / file).read_text())
    monkeypatch.chdir(tmp_path)
    assert checked("new-model", "new-model", "Falcon4", "--like", "qwen3") == (0, "written")


@pytest.mark.slow
def test_answers_of_verify_and_report(tmp_path):
    config = str(Path(TINY, "config.json"))
    assert checked("verify", "verify", config) == (0, "verified")
    code, status = checked("report", "report", config, "--output", str(tmp_path))
    assert (code, status) in ((0, "passed"), (1, "failed"))
