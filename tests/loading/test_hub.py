"""resolve_model against a real server on this machine: what is downloaded, what is kept, what each failure says."""

import errno
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from jaxis.errors import CheckpointError
from jaxis.loading.checkpoint import Checkpoint
from jaxis.loading.hub import resolve_model
from tests.support.hub_server import HubClient, HubServer

WEIGHTS = save({"w": np.arange(50_000, dtype=np.float32)})
WANTED = {
    "config.json": b"{}",
    "generation_config.json": b"{}",
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "tokenizer.model": b"x",
    "vocab.json": b"{}",
    "merges.txt": b"",
    "chat_template.jinja": b"{{ messages }}",
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    "preprocessor_config.json": b"{}",
    "processor_config.json": b"{}",
    "model.safetensors": WEIGHTS,
}
VECTORS = {
    "config.json": b"{}",
    "model.safetensors": WEIGHTS,
    "modules.json": b"[]",
    "sentence_bert_config.json": b"{}",
    "config_sentence_transformers.json": b"{}",
    "1_Pooling/config.json": b"{}",
    "2_Dense/config.json": b"{}",
    "2_Dense/model.safetensors": WEIGHTS,
}
UNWANTED = {
    "README.md": b"a card",
    "pytorch_model.bin": b"x",
    "consolidated.safetensors": WEIGHTS,
    "original/consolidated.00.pth": b"x",
    "onnx/model.safetensors": WEIGHTS,
    "onnx/tokenizer.json": b"{}",
    "tokenizer/vocab.json": b"{}",
    "original/model.safetensors.index.json": b"{}",
    "modeling_custom.py": b"raise SystemExit",
    "model-Q4.gguf": b"x",
}


def small(label):
    return {"config.json": label, "model.safetensors": WEIGHTS}


@pytest.fixture(scope="module")
def hub():
    server = HubServer(
        {
            "org/model": {"main": {**WANTED, **UNWANTED}, "v2": small(b'{"v": 2}')},
            "org/vectors": {"main": {**VECTORS, **UNWANTED}},
            "org/gated": {"main": small(b"{}")},
            "org/private": {"main": small(b'{"private": 1}')},
            "org/cut": {"main": small(b"{}")},
            "org/short": {"main": small(b"{}")},
        }
    )
    server.gated, server.private, server.token = {"org/gated"}, {"org/private"}, "right"
    yield server
    server.close()


@pytest.fixture(scope="module")
def client(hub, tmp_path_factory):
    client = HubClient(tmp_path_factory.mktemp("hf_home"), HF_ENDPOINT=hub.url)
    yield client
    client.close()


def error_of(answer):
    assert "\n" not in answer["error"]
    return answer["error"]


def test_folder_is_used_as_it_is(tmp_path):
    assert resolve_model(tmp_path) == tmp_path
    assert resolve_model(str(tmp_path)) == tmp_path


def test_folder_with_a_revision_or_a_file_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="revision='main' applies to a Hub id"):
        resolve_model(tmp_path, revision="main")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="is a file: give a GGUF file, or the folder"):
        resolve_model(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    "model",
    ["", "/no/such/folder", "./model", "../model", "~/nowhere-at-all", "~no-such-user/model", "a/b/c", "org\\model"],
)
def test_what_looks_like_a_path_is_not_looked_up_on_the_hub(model):
    with pytest.raises(CheckpointError, match="there is no folder"):
        resolve_model(model)


@pytest.mark.parametrize("model", ["my model", "-x", "a--b", "org/model.git", "m" * 300])
def test_what_can_be_neither_folder_nor_hub_id_is_refused(model):
    with pytest.raises(CheckpointError, match=r"there is no folder .*not a Hub id"):
        resolve_model(model)


def test_download_fetches_what_is_needed_and_nothing_else(hub, client):
    folder = Path(client.resolve("org/model")["folder"])
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert found == WANTED
    np.testing.assert_array_equal(Checkpoint(folder).tensor("w"), np.arange(50_000))


def test_modules_after_the_model_come_with_it(hub, client):
    folder = Path(client.resolve("org/vectors")["folder"])
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == set(VECTORS)


def test_second_run_downloads_nothing(hub, client):
    first = client.resolve("org/model")
    hub.requests.clear()
    assert client.resolve("org/model") == first
    assert not [request for request in hub.requests if "/resolve/" in request]


def test_revision_and_commit(hub, client):
    folder = Path(client.resolve("org/model", revision="v2")["folder"])
    assert (folder / "config.json").read_bytes() == b'{"v": 2}'
    assert client.resolve("org/model", revision=hub.commit("v2")) == {"folder": str(folder)}


def test_cache_dir_is_used(client, tmp_path):
    folder = Path(client.resolve("org/model", revision="v2", cache_dir=str(tmp_path))["folder"])
    assert folder.is_relative_to(tmp_path)


def test_unknown_repository_and_revision(client):
    assert "no folder org/nothing and no repository" in error_of(client.resolve("org/nothing"))
    assert "org/model has no revision 'v9'" in error_of(client.resolve("org/model", revision="v9"))


def test_gated_repository_says_how_to_get_in(client):
    message = error_of(client.resolve("org/gated"))
    assert "org/gated is gated" in message
    assert "hf auth login" in message


def test_private_repository_opens_to_its_token_only(client):
    assert "hf auth login" in error_of(client.resolve("org/private"))
    assert "hf auth login" in error_of(client.resolve("org/private", token="wrong"))
    folder = Path(client.resolve("org/private", token="right")["folder"])
    assert (folder / "config.json").read_bytes() == b'{"private": 1}'


def test_dropped_connection_is_resumed_where_it_stopped(hub, client):
    hub.cut["model.safetensors"] = 70_000
    folder = Path(client.resolve("org/cut")["folder"])
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert "model.safetensors" not in hub.cut


def test_file_that_arrives_too_short_is_not_kept(hub, client):
    hub.shortened = {"model.safetensors"}
    message = error_of(client.resolve("org/short"))
    assert "downloading org/short failed" in message
    assert "run again" in message
    assert "not completely, in the local cache" in error_of(client.resolve("org/short", local_files_only=True))
    hub.shortened = set()
    assert Checkpoint(client.resolve("org/short")["folder"]).names() == ("w",)


def test_cached_model_serves_without_the_hub(tmp_path):
    server = HubServer({"org/model": {"main": small(b"{}")}})
    online = HubClient(tmp_path, HF_ENDPOINT=server.url)
    offline = HubClient(tmp_path, HF_ENDPOINT=server.url, HF_HUB_OFFLINE="1")
    try:
        assert "org/model" in error_of(offline.resolve("org/model"))
        cached = online.resolve("org/model")
        assert "folder" in cached
        server.close()
        assert online.resolve("org/model") == cached
        assert online.resolve("org/model", local_files_only=True) == cached
        assert offline.resolve("org/model") == cached
        message = error_of(online.resolve("org/other"))
        assert "cannot be reached" in message
        assert "not completely in the local cache" in message
        message = error_of(offline.resolve("org/other"))
        assert "not, or not completely, in the local cache" in message
        assert "unset HF_HUB_OFFLINE" in message
    finally:
        online.close()
        offline.close()


def test_full_disk_says_where_else_to_download_to(monkeypatch):
    import huggingface_hub

    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(
        CheckpointError, match="disk is full while downloading org/model: free space, or give cache_dir"
    ):
        resolve_model("org/model")


GGUF = {
    "model-Q4_K_M.gguf": b"GGUF 4",
    "model-Q4_K_S.gguf": b"GGUF s",
    "UD-Q2/model-UD-Q2_K_XL-00001-of-00002.gguf": b"GGUF one",
    "UD-Q2/model-UD-Q2_K_XL-00002-of-00002.gguf": b"GGUF two",
    "mmproj-model-f16.gguf": b"GGUF vision",
    "model.imatrix.gguf": b"GGUF statistics",
    "README.md": b"a card",
    "config.json": b"{}",
}


@pytest.fixture
def gguf_hub(hub):
    hub.repositories["org/quants"] = {"main": {name: data for name, data in GGUF.items() if name != "config.json"}}
    hub.repositories["org/one"] = {"main": {"model.Q8_0.gguf": b"GGUF 8", "mmproj.gguf": b"GGUF v"}}
    hub.repositories["org/none"] = {"main": {"README.md": b"a card"}}
    hub.requests.clear()
    return hub


def downloaded(path):
    root = next(parent for parent in path.parents if parent.parent.name == "snapshots")
    return {str(each.relative_to(root)) for each in root.rglob("*") if each.is_file()}


def test_the_gguf_file_of_a_quantization_and_its_vision_part_and_nothing_else_are_downloaded(gguf_hub, client):
    path = Path(client.resolve("org/quants:q4_k_m")["folder"])
    assert path.read_bytes() == b"GGUF 4"
    assert downloaded(path) == {"model-Q4_K_M.gguf", "mmproj-model-f16.gguf"}
    assert path == Path(client.resolve("org/quants/model-Q4_K_M.gguf")["folder"])


def test_all_shards_of_a_quantization_are_downloaded(gguf_hub, client):
    path = Path(client.resolve("org/quants:Q2_K_XL")["folder"])
    assert path.read_bytes() == b"GGUF one"
    assert path.with_name("model-UD-Q2_K_XL-00002-of-00002.gguf").read_bytes() == b"GGUF two"
    shard = "org/quants/UD-Q2/model-UD-Q2_K_XL-00002-of-00002.gguf"
    assert Path(client.resolve(shard)["folder"]) == path


def test_a_repository_with_one_gguf_model_needs_no_choice(gguf_hub, client):
    assert Path(client.resolve("org/one")["folder"]).read_bytes() == b"GGUF 8"


def test_a_quantization_that_is_cached_needs_no_hub(gguf_hub, client):
    path = client.resolve("org/quants:Q4_K_S")["folder"]
    gguf_hub.requests.clear()
    assert client.resolve("org/quants:Q4_K_S", local_files_only=True)["folder"] == path
    assert not gguf_hub.requests
    assert "has no GGUF file Q4_K_XL" in error_of(client.resolve("org/quants:Q4_K_XL", local_files_only=True))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("org/quants:Q9", "org/quants has no GGUF file Q9; it has UD-Q2_K_XL, Q4_K_M, Q4_K_S"),
        ("org/quants:Q4_K", "org/quants has no GGUF file Q4_K; it has UD-Q2_K_XL, Q4_K_M, Q4_K_S"),
        ("org/quants/other.gguf", "org/quants has no GGUF file other.gguf; it has"),
        ("org/quants", "has 3 GGUF models: give one, as org/quants:UD-Q2_K_XL (it has UD-Q2_K_XL, Q4_K_M, Q4_K_S)"),
        ("org/quants:model", "org/quants has 3 models model: give the path of one, as org/quants/UD-Q2/model-UD-Q2"),
        ("org/none", "org/none has neither safetensors weights nor GGUF files"),
        ("org/missing:Q4_K_M", "no repository of that id"),
        ("org/a/b/c:Q4", "there is no folder or file 'org/a/b/c:Q4'"),
    ],
)
def test_a_gguf_file_that_cannot_be_chosen_is_explained(model, message, gguf_hub, client):
    assert message in error_of(client.resolve(model))
