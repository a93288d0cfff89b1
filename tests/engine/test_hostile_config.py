"""A config.json that is meant to do harm: one line, before anything is loaded or waited for."""

import json
import os
import shutil

import pytest

from jaxis.engine.arguments import EngineArgs
from jaxis.engine.opened_model import EMBEDDED_MODEL
from jaxis.engine.setup import build_engine
from jaxis.errors import CheckpointError, JaxisError
from jaxis.host.progress import ProgressDisplay

CONFIG = json.loads((EMBEDDED_MODEL / "config.json").read_text())
HOSTILE = ["big", -64, 2.5, 10**9, 10**30, True, {}, [10**9], float("inf")]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    shutil.copytree(EMBEDDED_MODEL, tmp_path / "model")
    monkeypatch.setattr("jaxis.engine.opened_model.load_model", lambda *_: pytest.fail("it loads"))
    return tmp_path / "model"


def error_of(folder):
    with pytest.raises(JaxisError) as error:
        build_engine(EngineArgs(str(folder), kv_cache_memory="4MiB"), ProgressDisplay(False))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500
    return error


NUMBERS = [key for key, value in CONFIG.items() if type(value) in (int, float) and not key.endswith("_token_id")]


@pytest.mark.parametrize("key", NUMBERS)
def test_numbers(folder, key):
    for value in HOSTILE:
        if key in ("rope_theta", "rms_norm_eps", "max_position_embeddings") and value in (-64, 2.5, 10**9):
            continue  # values that no check can tell to be wrong
        (folder / "config.json").write_text(json.dumps(CONFIG | {key: value}))
        assert key in str(error_of(folder).value), value


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "120 MB", "loop"])
def test_what_is_no_file_or_too_large_is_not_opened(folder, name, kind):
    path = folder / name
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    else:
        with path.open("wb") as file:
            file.truncate(120_000_000)
    if kind == "loop" and name == "generation_config.json":
        pytest.skip("a link to nothing is no file, and the settings may be missing")
    error = error_of(folder)
    assert name in str(error.value)
    assert isinstance(error.value, CheckpointError)
