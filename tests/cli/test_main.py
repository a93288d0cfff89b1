"""The command as a whole: help, version, completion, and what it does not import."""

import re
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from jaxis.cli.command import Command
from jaxis.cli.main import app
from jaxis.version import __version__


def test_help_shows_commands_and_examples(run_jaxis):
    result = run_jaxis("--help")
    assert result.returncode == 0
    for expected in ("generate", "chat", "bench", "env", "Examples", 'jaxis generate "What is the capital of France?"'):
        assert expected in result.stdout
    assert result.stderr == ""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("command", ["generate", "chat", "quantize", "bench", "env"])
def test_every_command_has_examples_in_its_help(invoke, command):
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert f"jaxis {command}" in result.stdout


COMMANDS = [
    *(
        "generate",
        "chat",
        "serve",
        "infer",
        "train",
        "run-batch",
        "embed",
        "quantize",
        "pack",
        "analyze",
        "convert",
        "verify",
        "report",
    ),
    *("new-key", "pull", "list", "rm", "new-model", "env", "bench latency", "bench throughput"),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_is_cut_from_the_help_at_80_columns(invoke, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    result = invoke(*command.split(), "--help")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in result.stdout


def test_version(invoke):
    result = invoke("--version")
    assert (result.exit_code, result.stdout) == (0, f"jaxis {__version__}\n")


def test_the_command_line_is_parsed_without_jax():
    program = """
import sys
from jaxis.cli.main import app
try:
    app(["generate", "--help"], prog_name="jaxis")
except SystemExit:
    pass
print(sorted({"jax", "flax", "torch", "transformers", "prompt_toolkit"} & set(sys.modules)))
"""
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1] == "[]"


def test_a_command_imports_no_other():
    program = """
import sys
from jaxis.cli.main import main
sys.argv = ["jaxis", "generate", "--help"]
try:
    main()
except SystemExit:
    pass
print(sorted(name for name in ("serve", "train", "plan", "generate") if f"jaxis.cli.{name}" in sys.modules))
"""
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1] == "['generate']"


@pytest.mark.parametrize(("arguments", "shown"), [(["generat"], "generate"), (["--help"], "serve"), ([], "serve")])
def test_without_a_known_command_all_are_known(arguments, shown):
    program = f"import sys; from jaxis.cli.main import main; sys.argv = ['jaxis', *{arguments!r}]; main()"
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert shown in process.stdout + process.stderr


def test_shell_completion_offers_the_commands(run_jaxis, monkeypatch, cli_environment):
    monkeypatch.setitem(cli_environment, "_JAXIS_COMPLETE", "complete_bash")
    monkeypatch.setitem(cli_environment, "COMP_WORDS", "jaxis ge")
    monkeypatch.setitem(cli_environment, "COMP_CWORD", "1")
    assert run_jaxis().stdout.split() == ["generate"]


@pytest.mark.parametrize("arguments", [["frobnicate"], ["generate", "x", "--nope"], ["chat", "a", "b"]])
def test_wrong_usage_exits_with_2(invoke, arguments):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Usage:" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_missing_model_is_one_line_and_exit_code_1():
    result = CliRunner().invoke(app, ["generate", "/nonexistent/folder", "hello"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert re.fullmatch(r"jaxis: error: .*/nonexistent/folder.*\n", result.stderr)


def test_debug_shows_the_traceback(run_jaxis):
    result = run_jaxis("generate", "/nonexistent/folder", "hello", "--debug")
    assert result.returncode == 1
    assert "Traceback" in result.stderr
    assert "CheckpointError" in result.stderr


def test_the_command_of_a_room_that_is_not_installed_is_one_error_and_not_in_the_help():
    app = typer.Typer()
    Command("present", lambda: print("runs"), "bench").add_to(app)
    Command("absent", lambda: print("runs"), "frescos").add_to(app)
    assert "absent" not in CliRunner().invoke(app, ["--help"]).stdout
    assert CliRunner().invoke(app, ["present"]).stdout == "runs\n"
    result = CliRunner().invoke(app, ["absent", "a", "--help", "--some=x"])
    expected = "jaxis: error: jaxis absent needs jaxis.frescos, which is not part of this installation\n"
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", expected)
