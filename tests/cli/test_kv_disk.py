"""`jaxis serve --kv-disk [SIZE]`: what it stands for, and that a restarted server finds what the last one computed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
from collections import namedtuple
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from jaxis.cli.kv_disk import kv_disk_arguments, with_size
from jaxis.cli.main import app
from tests.support.cli_model import JAXIS

GIB = 1 << 30


@pytest.fixture
def served(monkeypatch):
    """Runs `jaxis serve` up to where it would load; returns the engine's arguments, or the error."""
    found = {}

    def run(*arguments):
        def serve(_server, _config, engine_arguments, _listener, **_):
            found.update(engine_arguments)

        monkeypatch.setattr("jaxis.cli.serve._serve", serve)
        result = CliRunner().invoke(app, ["serve", "--port", "0", *arguments])
        return found if result.exit_code == 0 else result.stderr

    return run


@pytest.mark.parametrize(
    ("given", "size"),
    [
        (["./model", "--kv-disk"], "auto"),
        (["--kv-disk", "./model"], "auto"),
        (["--kv-disk", "--port", "1"], "auto"),
        (["--kv-disk", "20GiB", "./model"], "20GiB"),
        (["--kv-disk=3G"], "3G"),
    ],
)
def test_the_size_may_be_left_out_wherever_the_option_stands(given, size):
    arguments = with_size(given)
    place = arguments.index("--kv-disk") if "--kv-disk" in arguments else None
    found = arguments[place + 1] if place is not None else next(a for a in arguments if "=" in a).partition("=")[2]
    assert found == size
    assert ("./model" in arguments) == ("./model" in given)


@pytest.mark.parametrize(("free", "expected"), [(40 * GIB, 10 * GIB), (4000 * GIB, 100 * GIB)])
def test_without_a_size_it_is_a_bounded_share_of_the_free_disk(monkeypatch, tmp_path, free, expected):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(free, 0, free))
    found = kv_disk_arguments("auto", {"kv_offloading_dir": tmp_path / "not" / "there"})
    assert found["kv_offloading_disk_size"] == expected
    assert 0 < found["kv_offloading_size"] <= 8


def test_the_option_is_the_three_of_kv_offloading(served, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = served("--kv-disk", "2GiB")
    assert found["kv_offloading_dir"] == str(tmp_path / "jaxis" / "kv")
    assert found["kv_offloading_disk_size"] == 2 * GIB
    assert found["kv_offloading_size"] > 0
    found = served("--kv-disk", "1G", "--kv-offloading-size", "0.5", "--kv-offloading-dir", str(tmp_path / "own"))
    assert (found["kv_offloading_dir"], float(found["kv_offloading_size"])) == (str(tmp_path / "own"), 0.5)
    assert "--kv-disk='lots'" in served("--kv-disk=lots")
    assert not list(tmp_path.iterdir()), "nothing is written before the engine starts"


def test_a_restarted_server_reads_nothing_again_and_only_its_owner_can_read_what_it_keeps(cli_environment, tmp_path):
    environment = cli_environment | {"XDG_CACHE_HOME": str(tmp_path)}
    prompt = list(range(2, 302))

    def run():
        sizes = ("--kv-cache-memory", "16MiB", "--max-num-batched-tokens", "64", "--max-num-seqs", "4")
        command = [*JAXIS, "serve", "--port", "0", *sizes, "--kv-disk", "64MiB"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "curl" in line:
                break
        url = next(line.split()[1] for line in lines if line.startswith("url:"))
        body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "logprobs": 0}
        answer = httpx.post(f"{url}/completions", json=body, timeout=60).json()
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=60)
        return "".join(lines) + rest, answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["choices"]

    said, cached, first = run()
    folder = tmp_path / "jaxis" / "kv"
    assert cached == 0
    assert f"disk:   at most 64.0 MiB of keys and values, which tell what prompts said, in {folder}" in said
    assert "holds 0 B" in said
    said, cached, second = run()
    assert cached == 288
    assert json.dumps(first) == json.dumps(second), "log-probabilities included"
    assert "holds 0 B" not in said
    for path in (folder, *folder.rglob("*")):
        mode = stat.S_IMODE(os.stat(path).st_mode)
        assert mode == (0o700 if Path(path).is_dir() else 0o600), path
