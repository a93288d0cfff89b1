"""`jaxis pull`, `list` and `rm` against a Hub on this machine and a cache of their own."""

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxis.loading import hub_cache
from jaxis.loading.hub_cache import CachedModel
from tests.support.hub_server import HubServer, client_environment

WEIGHTS = b"w" * 3000
FILES = {"config.json": b"{}", "model.safetensors": WEIGHTS}


@pytest.fixture(scope="module")
def hub():
    first = FILES | {"modeling_x.py": b"raise SystemExit", "pytorch_model.bin": b"x", "README.md": b"x"}
    server = HubServer(
        {
            "org/model": {"main": first, "v2": FILES | {"config.json": b'{"v": 2}'}},
            "org/gguf": {"main": {"x-Q4_K_M.gguf": b"GGUF4", "x-Q8_0.gguf": b"GGUF-8"}},
        }
    )
    yield server
    server.close()


MISTAKES = {
    "pull org/nothing": "no repository of that id",
    "pull .": ". is a local path: there is nothing to download",
    "pull org/model --revision v9": "has no revision 'v9'",
    "rm org/model --yes": "org/model is not in the cache: `jaxis list` shows what is",
}
# Commands follow each other in one process: huggingface_hub reads its environment once, when it is imported.
PROGRAM = """
import json, sys
from typer.testing import CliRunner
from jaxis.cli.main import app

for command in json.loads(sys.argv[1]):
    result = CliRunner().invoke(app, command)
    print(json.dumps([result.exit_code, result.stdout, result.stderr]))
"""


@pytest.fixture
def run(hub, tmp_path):
    """Runs commands, given as strings; returns what each exits with and prints to stdout and stderr."""

    def run(*commands):
        environment = client_environment(tmp_path / "cache", HF_ENDPOINT=hub.url, XDG_CACHE_HOME=str(tmp_path))
        arguments = [sys.executable, "-c", PROGRAM, json.dumps([command.split() for command in commands])]
        printed = subprocess.run(arguments, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
        return [json.loads(line) for line in printed.splitlines()]

    return run


def test_models_are_pulled_listed_and_removed(run, hub, tmp_path):
    main, v2 = hub.commit("main"), hub.commit("v2")
    *mistakes, nothing, pulled, pinned, gguf, listed, as_json, asked = run(
        *MISTAKES,
        "list",
        "pull org/model",
        f"pull org/model --revision {v2}",
        "pull org/gguf:Q4_K_M",
        "list",
        "list --json",
        "rm org/model",
    )
    for (exit_code, stdout, stderr), message in zip(mistakes, MISTAKES.values(), strict=True):
        [line] = stderr.strip().splitlines()
        assert (exit_code, stdout) == (1, "")
        assert line.startswith("jaxis: error: ")
        assert message in line
    assert nothing[:2] == [0, ""]
    assert "no models yet: `jaxis pull MODEL` downloads one" in nothing[2]
    folder = tmp_path / "cache" / "hub" / "models--org--model" / "snapshots" / main
    assert pulled[:2] == [0, f"{folder}\n"], pulled
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    assert f"org/model at commit {main}, 2.9 KiB in 2 files" in pulled[2]
    assert pinned[0] == 0
    assert json.loads((folder.parent / v2 / "config.json").read_text()) == {"v": 2}
    assert gguf[1].endswith("/x-Q4_K_M.gguf\n")

    rows = [line.split() for line in listed[1].splitlines()]
    assert rows[0] == ["model", "revision", "commit", "size", "last", "used"]
    assert [row[0] for row in rows[1:]] == ["org/gguf", "org/model", "org/model"]
    assert sorted(row[1:3] for row in rows[2:]) == [["-", v2[:12]], ["main", main[:12]]]
    [found] = [line for line in map(json.loads, as_json[1].splitlines()) if line["name"] == "org/gguf"]
    assert (found["nbytes"], found["num_files"], found["refs"]) == (5, 1, ["main"])

    assert asked[0] == 1
    assert "nothing was deleted: stdin is no terminal to ask on, so give --yes" in asked[2]
    [removed] = run(f"rm org/model --revision {v2[:8]} --yes")
    assert removed[0] == 0
    assert removed[2].endswith("\n8 B freed\n")  # its weights are those of main, which stays
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    rest, left = run("rm org/model --yes", "list")
    assert "2.9 KiB freed" in rest[2]
    assert not folder.parent.parent.exists()
    assert [line.split()[0] for line in left[1].splitlines()[1:]] == ["org/gguf"]


def test_it_asks_on_a_terminal_and_no_leaves_everything(invoke, monkeypatch):
    model = CachedModel("org/model", "c" * 40, ("main",), 3000, 2, Path("x"), datetime.now(UTC))
    removed = []
    monkeypatch.setattr(hub_cache, "find_cached", lambda *_: [model])
    monkeypatch.setattr(hub_cache, "remove_cached", lambda models: removed.append(models) or 3000)
    monkeypatch.setattr("jaxis.cli.models.sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True)))
    refused = invoke("rm", "org/model", stdin="n\n")
    assert (refused.exit_code, removed) == (0, [])
    assert "org/model main, cccccccccccc, 2.9 KiB\nDelete this? [y/N]:" in refused.stderr
    assert "nothing was deleted" in refused.stderr
    assert invoke("rm", "org/model", stdin="y\n").stderr.endswith("2.9 KiB freed\n")
    assert removed == [[model]]
