"""Weights of the served model that requests change, under vLLM's names."""

import shutil
import threading

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxis.engine.arguments import EngineArgs
from jaxis.engine.opened_model import EMBEDDED_MODEL
from jaxis.engine.setup import build_engine
from jaxis.host.progress import ProgressDisplay
from tests.server.conftest import serving
from tests.server.http.test_api_keys import write_keys

SHORT = {"prompt": [1] * 40, "max_tokens": 6, "temperature": 0, "logprobs": 0, "return_token_ids": True}
SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_cache_memory": "32MiB"}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Folders with the embedded model's weights, and with others."""
    root = tmp_path_factory.mktemp("root")
    for number, name in enumerate(("same", "other")):
        folder = shutil.copytree(EMBEDDED_MODEL, root / name)
        for path in folder.glob("*.safetensors"):
            rng = np.random.default_rng(0)
            tensors = load_file(path)
            noisy = {
                k: (x + number * 0.3 * x * rng.standard_normal(x.shape)).astype(x.dtype) for k, x in tensors.items()
            }
            save_file(noisy, path, {"format": "pt"})
    (root / "broken").mkdir()
    (root / "outside").symlink_to(EMBEDDED_MODEL)
    return root


@pytest.fixture(scope="module")
def keys(root):
    return write_keys(root / "keys", root={"admin": True}, alice={})


@pytest.fixture(scope="module")
def http(root, keys):
    built = build_engine(EngineArgs(**SIZES), ProgressDisplay(False))
    with serving(built, api_key_file=root / "keys", weights_root=root) as server:
        headers = {"Authorization": f"Bearer {keys['root']}"}
        with httpx.Client(base_url=server.url, timeout=60, headers=headers) as client:
            yield client
    built.engine.close()


def complete(http, **fields):
    answer = http.post("/v1/completions", json=SHORT | fields)
    answer.raise_for_status()
    [choice] = answer.json()["choices"]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"], answer.json()["system_fingerprint"]


def done(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()


def refusal(answer):
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert "\n" not in message
    return message


def update(http, path, **info):
    return http.post("/update_weights", json={"update_info": {"path": str(path), **info}})


def test_weights_come_from_a_folder(http, root):
    """At once, or at the end of an update that was started; the answers are those of a fresh server."""
    before = complete(http)
    other = build_engine(EngineArgs(model=str(root / "other"), **SIZES), ProgressDisplay(False))
    with serving(other) as fresh, httpx.Client(base_url=fresh.url, timeout=60) as client:
        expected = complete(client)
    other.engine.close()
    assert expected[:2] != before[:2]
    assert done(update(http, "other", version="step 1")) == {"message": "Weights updated"}
    assert done(http.get("/weight_info")) == {"weight_version": "step 1"}
    changed = complete(http)
    assert changed[:2] == expected[:2]
    assert changed[2] != before[2]
    done(http.post("/init_weight_transfer_engine", json={"init_info": {}}))
    done(http.post("/start_weight_update", json={}))
    done(update(http, root / "same"))
    assert complete(http) == changed
    done(http.post("/finish_weight_update", json={"weight_version": "step 2"}))
    assert done(http.get("/weight_info")) == {"weight_version": "step 2"}
    assert complete(http)[:2] == before[:2]


def test_what_cannot_be_done_is_said(http, root):
    before = complete(http)
    for path, message in {
        "/etc": "outside of the folder",
        "..": "outside of the folder",
        "outside": "outside of the folder",
        "missing": "no folder of --weights-root",
        "a\0b": "is no path",
        "broken": "no *.safetensors files",
    }.items():
        assert message in refusal(update(http, path))
    assert "must name a folder" in refusal(http.post("/update_weights", json={"update_info": {"names": ["a"]}}))
    assert "version=-1 must be" in refusal(update(http, "other", version=-1))
    nccl = {"init_info": {"master_address": "127.0.0.1", "master_port": 1, "world_size": 2}}
    assert "do not come by nccl" in refusal(http.post("/init_weight_transfer_engine", json=nccl))
    assert "no weights were named" in refusal(http.post("/finish_weight_update", json={}))
    for path in ("/weight_checker", "/abort_requests", "/update_weight_version", "/start_draft_weight_update"):
        assert f"{path} is not supported" in refusal(http.post(path))
    assert complete(http) == before


def test_only_admin_keys_may(http, root, keys):
    headers = {"Authorization": f"Bearer {keys['alice']}"}
    paths = [("POST", path) for path in ("/pause", "/resume", "/sleep", "/wake_up", "/update_weights")]
    for method, path in [*paths, ("GET", "/is_paused"), ("GET", "/get_world_size"), ("GET", "/server_info")]:
        assert http.request(method, path, headers=headers).status_code == 403


def in_background(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    return thread, found


def stream_begins(http, lines):
    """Reads until the stream has said something."""
    for line in lines:
        if line.startswith("data: {"):
            return


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_requests_wait_while_the_engine_is_paused(mode, http):
    expected = complete(http)
    long = SHORT | {"max_tokens": 200, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=long) as running:
        lines = running.iter_lines()
        stream_begins(http, lines)
        assert done(http.post("/pause", params={"mode": mode})) == {"status": "paused"}
        assert done(http.get("/is_paused")) == {"is_paused": True}
        thread, found = in_background(lambda: complete(http))
        if mode != "keep":
            [*_, last] = [line for line in lines if line.startswith("data: {")]
            assert ('"finish_reason":"abort"' in last.replace(" ", "")) == (mode == "abort")
        assert not found
        assert done(http.post("/resume")) == {"status": "resumed"}
        thread.join(60)
        assert found == [expected]
        if mode == "keep":
            [*_, last] = [line for line in lines if line.startswith("data: {")]
            assert '"finish_reason":"length"' in last.replace(" ", "")


def test_an_engine_sleeps_and_wakes_up_with_other_weights(http, root):
    done(update(http, "same"))
    before = complete(http)
    done(http.post("/sleep", params={"level": 2}))
    assert done(http.get("/is_sleeping")) == {"is_sleeping": True}
    thread, found = in_background(lambda: complete(http))
    done(update(http, "other"))
    assert done(http.post("/wake_up", params={"tags": "weights"})) == {"status": "asleep"}
    assert not found
    assert done(http.post("/wake_up")) == {"status": "awake"}
    thread.join(60)
    assert found[0][:2] != before[:2]
    assert done(http.get("/is_sleeping")) == {"is_sleeping": False}
    done(http.post("/sleep"))
    done(update(http, "same"))
    done(http.post("/wake_up"))
    assert complete(http) == before


def test_what_trl_asks_for(http):
    assert done(http.get("/get_world_size")) == {"world_size": 1}
    config = done(http.get("/server_info", params={"config_format": "json"}))["vllm_config"]
    assert config["weight_transfer_config"] == {"backend": "file"}
    assert config["model_config"]["logprobs_mode"] == "raw_logprobs"


def test_without_a_root_no_weights_are_read(root, keys):
    built = build_engine(EngineArgs(**SIZES), ProgressDisplay(False))
    headers = {"Authorization": f"Bearer {keys['root']}"}
    with (
        serving(built, api_key_file=root / "keys") as server,
        httpx.Client(base_url=server.url, headers=headers) as http,
    ):
        assert "--weights-root" in refusal(update(http, "same"))
    built.engine.close()
