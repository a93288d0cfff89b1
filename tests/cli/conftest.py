"""Runs the command in this process, with a model loaded once, or in a process of its own."""

import contextlib
import os
import subprocess

import pytest
from typer.testing import CliRunner

from jaxis import LLM
from jaxis.cli.main import app
from tests.support.cli_model import JAXIS, write_checkpoint


@pytest.fixture(scope="session")
def cli_home(tmp_path_factory):
    """A home of its own, so that no test reads or writes the user's history."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("cli") / "chat-model")


@pytest.fixture(scope="session")
def tokens_model(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("cli") / "tokens-model", tokenizer=False)


@pytest.fixture(scope="session")
def chat_llm(chat_model):
    """The chat model in this process, as the command loads it."""
    with LLM(chat_model, load_format="dummy", show_progress=False) as llm:
        yield llm


@pytest.fixture
def invoke(monkeypatch, chat_llm, chat_model):
    """Runs the command in this process, with `chat_llm` whatever the model, and notes what it was opened with."""
    opened = []

    def open_llm(model, arguments, **_):
        opened.append((model, arguments))
        return contextlib.nullcontext(chat_llm)

    monkeypatch.setattr("jaxis.cli.generate.open_llm", open_llm)
    monkeypatch.setattr("jaxis.cli.chat.open_llm", open_llm)

    def run(*args, stdin=None):
        return CliRunner().invoke(app, [str(arg) for arg in args], input=stdin)

    run.opened = opened
    return run


@pytest.fixture(scope="session")
def cli_environment(cli_home):
    return {
        **os.environ,
        "XDG_STATE_HOME": str(cli_home / "state"),
        "JAX_PLATFORMS": "cpu",
        "TERM": "xterm",
        "COLUMNS": "200",
    }


@pytest.fixture
def run_jaxis(cli_environment):
    """Runs the command in a process of its own, with stdin, stdout and stderr as pipes."""

    def run(*args, stdin=""):
        command = [*JAXIS, *map(str, args)]
        return subprocess.run(
            command, input=stdin, capture_output=True, text=True, timeout=120, env=cli_environment, check=False
        )

    return run
