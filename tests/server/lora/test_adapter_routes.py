"""Adapters that requests ask for by name, over HTTP: each protocol, their loading and unloading, and attacks on it."""

import contextlib
import json
import os
import struct
import time

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxis.engine.arguments import EngineArgs
from jaxis.engine.client.async_llm_engine import AsyncLLMEngine
from jaxis.engine.client.engine_client import EngineStats
from jaxis.engine.opened_model import EMBEDDED_MODEL
from jaxis.engine.scheduling.places import PlaceUse
from jaxis.engine.setup import build_engine
from jaxis.host.progress import ProgressDisplay
from tests.server.conftest import serving
from tests.server.http.test_api_keys import write_keys
from tests.support.adapters import edit_config, save_adapter

PROMPT = "Once upon a time"
SHORT = {"max_tokens": 8, "temperature": 0}
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    for i, name in enumerate(("poet", "clerk", "other")):
        save_adapter(EMBEDDED_MODEL, folder / name, seed=i, scale=0.5)
    return folder


@pytest.fixture(scope="module")
def built(root):
    arguments = EngineArgs(
        max_num_seqs=8,
        max_num_batched_tokens=64,
        kv_cache_memory="32MiB",
        enable_lora=True,
        max_loras=2,
        lora_root=root,
        lora_modules={"poet": "poet", "clerk": str(root / "clerk")},
    )
    built = build_engine(arguments, ProgressDisplay(False))
    yield built
    built.engine.close()


@pytest.fixture(scope="module")
def server(built):
    with serving(built, lora_updates=True) as running:
        yield running


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
        for card in client.get("/v1/models").json()["data"]:
            if card["id"] not in ("jaxis-tiny", "poet", "clerk"):
                client.post("/v1/unload_lora_adapter", json={"lora_name": card["id"]})


def complete(http, name):
    answer = http.post("/v1/completions", json={"model": name, "prompt": PROMPT} | SHORT)
    answer.raise_for_status()
    assert answer.json()["model"] == name
    return answer.json()["choices"][0]["text"]


def load(http, name, path, **fields):
    return http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)} | fields)


def unload(http, name):
    return http.post("/v1/unload_lora_adapter", json={"lora_name": name})


def message(answer):
    assert answer.status_code in (400, 403, 404), answer.text
    text = answer.json()["error"]["message"]
    assert "\n" not in text
    return text


def test_every_protocol_answers_by_the_adapter_that_is_asked_for(server, http):
    def chat(name):
        return http.post("/v1/chat/completions", json={"model": name, "messages": MESSAGES} | SHORT).json()

    answers = {name: chat(name)["choices"][0]["message"]["content"] for name in ("jaxis-tiny", "poet", "clerk")}
    assert len(set(answers.values())) == 3
    assert chat("poet")["system_fingerprint"] != chat("clerk")["system_fingerprint"]
    for name, expected in answers.items():
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            found = client.responses.create(model=name, input=MESSAGES, max_output_tokens=8, temperature=0, store=False)
            assert found.output_text == expected
        found = http.post("/v1/messages", json={"model": name, "messages": MESSAGES} | SHORT).json()
        assert found["content"][0]["text"] == expected
        ollama = {"model": name, "messages": MESSAGES, "stream": False, "options": {"num_predict": 8, "temperature": 0}}
        assert http.post("/api/chat", json=ollama).json()["message"]["content"] == expected
        tagged = http.post("/api/chat", json=ollama | {"model": f"{name}:latest"}).json()
        assert tagged["message"]["content"] == expected
        rendered = http.post("/apply-template", json={"model": name, "messages": MESSAGES}).json()["prompt"]
        tokens = http.post("/tokenize", json={"model": name, "content": rendered}).json()["tokens"]
        body = {"model": name, "token_ids": tokens, "sampling_params": SHORT}
        ids = http.post("/inference/v1/generate", json=body).json()["choices"][0]["token_ids"]
        text = http.post("/detokenize", json={"model": name, "tokens": ids}).json()["prompt"]
        assert text.removesuffix("<|im_end|>") == expected


def test_models_are_listed_with_their_adapters(http, root):
    cards = {card["id"]: card for card in http.get("/v1/models").json()["data"]}
    assert set(cards) == {"jaxis-tiny", "poet", "clerk"}
    assert (cards["poet"]["parent"], cards["poet"]["root"]) == ("jaxis-tiny", "poet")
    assert cards["clerk"]["root"] == str(root / "clerk")
    assert "parent" not in cards["jaxis-tiny"]
    assert http.get("/v1/models/poet").json() == cards["poet"]
    assert {"poet:latest", "poet"} & {model["name"] for model in http.get("/api/tags").json()["models"]}
    assert http.get("/v1/models/nobody").status_code == 404


def test_adapters_are_loaded_replaced_and_unloaded(http, root):
    poet, clerk = complete(http, "poet"), complete(http, "clerk")
    assert http.post("/v1/completions", json={"model": "new", "prompt": PROMPT}).status_code == 404
    assert load(http, "new", "poet").status_code == 200
    assert complete(http, "new") == poet
    assert "is loaded already" in message(load(http, "new", "clerk"))
    assert load(http, "new", root / "clerk", load_inplace=True).status_code == 200
    assert complete(http, "new") == clerk
    assert unload(http, "new").status_code == 200
    assert unload(http, "new").status_code == 404
    assert http.post("/v1/completions", json={"model": "new", "prompt": PROMPT}).status_code == 404
    assert complete(http, "clerk") == clerk  # of the same files, under another name


def test_names_are_not_taken_twice(http):
    assert "is the model's own" in message(load(http, "jaxis-tiny", "poet", load_inplace=True))
    assert "only in the tag" in message(load(http, "poet:latest", "poet"))
    for name in ("", "a\nb", "x" * 300):
        assert "printable characters" in message(load(http, name, "poet"))


def test_a_request_that_runs_goes_on_with_an_adapter_that_is_unloaded(http, server, built):
    assert load(http, "new", "other").status_code == 200
    body = {"model": "new", "prompt": PROMPT, "stream": True, "max_tokens": 200, "ignore_eos": True, "temperature": 0}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert unload(http, "new").status_code == 200
        assert any("[DONE]" in line for line in lines)
    server.wait_until_idle()
    assert built.engine.runner.feature("adapter").store.num_known == 2


@contextlib.contextmanager
def damaged(root, name="bad"):
    folder = save_adapter(EMBEDDED_MODEL, root / name, seed=9)
    yield folder
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()


def test_nothing_outside_of_the_root_is_loaded(http, root, tmp_path):
    outside = save_adapter(EMBEDDED_MODEL, tmp_path / "outside")
    (root / "link").symlink_to(outside)
    for path in (
        outside,
        f"../{outside.name}",
        f"poet/../../{outside.name}",
        "link",
        "link/../outside",
        "..",
        "/",
        "~",
    ):
        assert "outside of the folder" in message(load(http, "new", path)), path
    assert str(tmp_path) not in message(load(http, "new", "link"))
    (root / "link").unlink()
    with damaged(root) as folder:
        (folder / "adapter_model.safetensors").unlink()
        (folder / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
        assert "outside of the folder" in message(load(http, "new", "bad"))
    for path in ("", "a\0b", "poet\n", "x" * 5000):
        assert "empty, too long or has a control character" in message(load(http, "new", path))
    assert "is not a folder" in message(load(http, "new", "nobody"))


def test_files_that_are_no_adapters_are_refused_in_a_line(http, root):
    with damaged(root) as folder:
        weights = folder / "adapter_model.safetensors"
        whole = weights.read_bytes()
        for data, expected in (
            (struct.pack("<Q", 10 << 30) + whole[8:], "header"),
            (whole[:-100], ""),
            (whole[:8], ""),
            (b"", ""),
        ):
            weights.write_bytes(data)
            assert expected in message(load(http, "new", "bad"))
        weights.unlink()
        os.truncate(os.open(weights, os.O_CREAT | os.O_WRONLY), 1 << 40)  # sparse
        assert "more than an adapter of this model" in message(load(http, "new", "bad"))
        weights.unlink()
        os.mkfifo(weights)
        assert "is not a file" in message(load(http, "new", "bad"))
        weights.unlink()
        weights.write_bytes(whole)
        edit_config(folder, r=8)
        assert "expected [8, ...]: its rank" in message(load(http, "new", "bad"))
        edit_config(folder, r=4, lora_dropuot=0.5)
        assert "lora_dropuot" in message(load(http, "new", "bad"))
        header = json.dumps(
            {"base_model.model.x.lora_A.weight": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}}
        )
        edit_config(folder, lora_dropuot=None)
        weights.write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(64))
        assert "base_model.model.x" in message(load(http, "new", "bad"))
    assert {card["id"] for card in http.get("/v1/models").json()["data"]} == {"jaxis-tiny", "poet", "clerk"}


def test_the_metric_names_the_adapters_of_running_and_of_waiting_requests(http, built, monkeypatch):
    digests = {name: digest for name, _, digest in built.engine.runner.feature("adapter").store.named}
    use = PlaceUse(2, (digests["poet"], bytes(32)), (digests["poet"], digests["clerk"]))
    monkeypatch.setattr(AsyncLLMEngine, "stats", lambda _: EngineStats(places=use))
    text = http.get("/metrics").text
    [found] = [each for each in text_string_to_metric_families(text) if each.name == "jaxis:lora_requests_info"]
    [sample] = found.samples
    assert abs(sample.value - time.time()) < 60
    assert sample.labels == {
        **{"model_name": "jaxis-tiny", "max_lora": "2"},
        **{"running_lora_adapters": "poet", "waiting_lora_adapters": "clerk,poet"},
    }


def test_an_adapter_of_another_model_names_the_module(http, root, tmp_path):
    from tests.support.tiny_checkpoints import write_checkpoint

    save_adapter(write_checkpoint(tmp_path / "base", "qwen3", tokenizer=False), root / "foreign")
    assert "the adapter was trained on another model" in message(load(http, "new", "foreign"))


def test_loading_needs_the_option_and_an_admin_key_where_there_are_keys(built, server, tmp_path):
    server.stop()
    texts = write_keys(tmp_path / "keys", admin={"admin": True}, user={})
    with serving(built, lora_updates=True, api_key_file=tmp_path / "keys") as running:
        for key, status in (("wrong", 401), (texts["user"], 403), (texts["admin"], 400)):
            headers = {"Authorization": f"Bearer {key}"}
            with httpx.Client(base_url=running.url, timeout=60, headers=headers) as client:
                assert load(client, "new", "nobody").status_code == status
                assert unload(client, "new").status_code == (404 if status == 400 else status)
    with serving(built) as running, httpx.Client(base_url=running.url, timeout=60) as client:
        assert "--lora-updates" in message(load(client, "new", "poet"))
        assert complete(client, "poet") != complete(client, "jaxis-tiny")


def test_a_server_without_adapters_says_so(built_engine):
    with serving(built_engine, lora_updates=True) as running, httpx.Client(base_url=running.url) as client:
        assert "--enable-lora" in message(load(client, "new", "poet"))
