"""`jaxis pull`, `list` and `rm` against a Hub on this machine and a cache of their own."""

import json
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxis.loading import hub_cache
from jaxis.loading.hub_cache import CachedModel
from tests.support.cli_model import JAXIS
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


@pytest.fixture
def run(hub, tmp_path):
    def run(*arguments, **settings):
        environment = client_environment(tmp_path / "cache", HF_ENDPOINT=hub.url)
        settings = {"stdin": subprocess.DEVNULL} | settings
        return subprocess.run([*JAXIS, *arguments], env=environment, capture_output=True, text=True, **settings)

    return run


def test_models_are_pulled_listed_and_removed(run, hub, tmp_path):
    listed = run("list")
    assert (listed.returncode, listed.stdout) == (0, "")
    assert "no models yet: `jaxis pull MODEL` downloads one" in listed.stderr

    pulled = run("pull", "org/model")
    assert pulled.returncode == 0, pulled.stderr
    folder = tmp_path / "cache" / "hub" / "models--org--model" / "snapshots" / hub.commit("main")
    assert pulled.stdout == f"{folder}\n"
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    assert f"org/model at commit {hub.commit('main')}, 2.9 KiB in 2 files" in pulled.stderr
    pinned = run("pull", "org/model", "--revision", hub.commit("v2"))
    assert json.loads((folder.parent / hub.commit("v2") / "config.json").read_text()) == {"v": 2}
    assert pinned.returncode == 0
    assert run("pull", "org/gguf:Q4_K_M").stdout.endswith("/x-Q4_K_M.gguf\n")

    rows = [line.split() for line in run("list").stdout.splitlines()]
    assert rows[0] == ["model", "revision", "commit", "size", "last", "used"]
    assert [row[0] for row in rows[1:]] == ["org/gguf", "org/model", "org/model"]
    assert sorted(row[1:3] for row in rows[2:]) == [["-", hub.commit("v2")[:12]], ["main", hub.commit("main")[:12]]]
    [gguf] = [line for line in map(json.loads, run("list", "--json").stdout.splitlines()) if line["name"] == "org/gguf"]
    assert (gguf["nbytes"], gguf["num_files"], gguf["refs"]) == (5, 1, ["main"])

    asked = run("rm", "org/model")
    assert asked.returncode == 1
    assert "nothing was deleted: stdin is no terminal to ask on, so give --yes" in asked.stderr
    assert folder.exists()
    removed = run("rm", "org/model", "--revision", hub.commit("v2")[:8], "--yes")
    assert removed.returncode == 0
    assert removed.stderr.endswith("\n8 B freed\n")  # its weights are those of main, which stays
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert "2.9 KiB freed" in run("rm", "org/model", "--yes").stderr
    assert not folder.parent.parent.exists()
    assert [line.split()[0] for line in run("list").stdout.splitlines()[1:]] == ["org/gguf"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("pull", "org/nothing"), "no repository of that id"),
        (("pull", "."), ". is a local path: there is nothing to download"),
        (("pull", "org/model", "--revision", "v9"), "has no revision 'v9'"),
        (("rm", "org/model", "--yes"), "org/model is not in the cache: `jaxis list` shows what is"),
    ],
)
def test_mistakes_are_one_line(run, arguments, message):
    result = run(*arguments)
    assert (result.returncode, result.stdout) == (1, "")
    [line] = result.stderr.strip().splitlines()
    assert line.startswith("jaxis: error: ")
    assert message in line


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
