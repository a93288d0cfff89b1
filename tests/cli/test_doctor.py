"""`jaxis doctor`: its lines, its report, its exit codes."""

import json

import pytest
from typer.testing import CliRunner

from jaxis.cli.main import app
from jaxis.doctor import examination
from jaxis.doctor.check import Case, CheckFailed


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs the command with few checks, and a report in `tmp_path`."""

    def run(*cases, args=()):
        monkeypatch.setattr(examination, "_cases", lambda: iter(cases))
        return CliRunner().invoke(app, ["doctor", "--output", str(tmp_path / "report"), *args])

    return run


def wrong():
    raise CheckFailed("relative error 3.0e-01, more than 1e-04")


GOOD, BAD = Case("kernels", "good", lambda: "relative error 0.0"), Case("kernels", "bad | worse", wrong)


def test_each_check_is_a_line_and_the_report_is_written(run, tmp_path):
    result = run(GOOD)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("ok     devices: JAX starts: ")
    assert lines[1].startswith("ok     kernels: good: relative error 0.0 (")
    assert "only a CPU" in lines[2]
    assert "Those for TPU and GPU were not." in lines[2]
    found = json.loads((tmp_path / "report" / "doctor.json").read_text())
    assert found["passed"] is True
    assert [check["name"] for check in found["checks"]] == ["JAX starts", "good"]
    assert "jax" in found["environment"]
    markdown = (tmp_path / "report" / "doctor.md").read_text()
    assert "everything is as it should be" in markdown
    assert "only a CPU" in markdown


def test_what_is_wrong_exits_with_1_and_has_its_line(run, tmp_path):
    result = run(BAD, GOOD)
    assert result.exit_code == 1
    assert "FAILED kernels: bad | worse: relative error 3.0e-01, more than 1e-04" in result.stdout
    assert "1 of 3 checks failed" in result.stderr
    markdown = (tmp_path / "report" / "doctor.md").read_text()
    assert "1 of 3 checks failed" in markdown
    assert "| **FAILED** | kernels: bad \\| worse |" in markdown


def test_json_is_one_object(run):
    result = run(GOOD, args=["--json"])
    assert json.loads(result.stdout)["schema"] == 1


def test_no_device_is_a_failed_check_and_not_a_traceback(run, monkeypatch):
    def no_devices():
        raise RuntimeError("Unable to initialize backend 'tpu'")

    monkeypatch.setattr(examination.jax, "local_devices", no_devices)
    result = run(GOOD)
    assert result.exit_code == 1
    assert "FAILED devices: JAX starts: RuntimeError: Unable to initialize backend 'tpu'" in result.stdout
    assert "nothing else was checked" in result.stdout


def test_a_report_that_cannot_be_written_is_one_line(run, tmp_path):
    (tmp_path / "report").write_text("a file")
    result = run(GOOD)
    assert result.exit_code == 3
    assert "cannot be written" in result.stderr.splitlines()[-1]


def test_everything_is_as_it_should_be_here(tmp_path):
    result = CliRunner().invoke(app, ["doctor", "--output", str(tmp_path)])
    assert result.exit_code == 0, result.stdout
