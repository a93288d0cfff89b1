"""Keys with names: the file, what their holders may ask for, and what is told of them."""

import hashlib
import logging
import re

import httpx
import pytest
import yaml

from jaxis.errors import ConfigError
from jaxis.server.http.api_keys import ApiKey, ApiKeys, new_api_key, read_api_keys, to_yaml
from tests.support.places import REPOSITORY

DIGEST = hashlib.sha256(b"the key").hexdigest()
SHORT = {"prompt": "Once", "max_tokens": 5, "ignore_eos": True}


def write_keys(path, **keys):
    """A file with these keys, name -> other fields; returns the text of each."""
    entries, texts = [], {}
    for name, fields in keys.items():
        texts[name], key = new_api_key(name, **fields)
        entries.append(to_yaml(key))
    path.write_text("".join(entries))
    return texts


def ask(server, key, **fields):
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{server.url}/v1/completions", json=SHORT | fields, headers=headers, timeout=60)


def metrics(server, key):
    """The metrics of API keys: name and labels -> value."""
    text = httpx.get(f"{server.url}/metrics", headers={"Authorization": f"Bearer {key}"}).text
    lines = [line for line in text.splitlines() if line.startswith("jaxis:api_key_") and "_created" not in line]
    return {line.rpartition(" ")[0].removeprefix("jaxis:api_key_"): float(line.rpartition(" ")[2]) for line in lines}


def test_a_key_that_was_made_is_found_by_its_text_and_the_file_does_not_have_it(tmp_path):
    texts = write_keys(tmp_path / "keys", alice={"requests_per_minute": 3, "priority": -1}, bob={})
    keys = ApiKeys(["given"], tmp_path / "keys")
    assert keys.find(texts["alice"]) == read_api_keys(tmp_path / "keys")[0]
    assert keys.find(texts["alice"]).requests_per_minute == 3
    assert keys.find(texts["bob"]).name == "bob"
    assert keys.find("given").name == "default"
    for wrong in ("", "given ", texts["bob"][:-1], keys.find(texts["bob"]).sha256):
        assert keys.find(wrong) is None
    assert not any(text in (tmp_path / "keys").read_text() for text in texts.values())
    assert not ApiKeys()


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ("", "not a YAML list of keys: make one with `jaxis new-key NAME >> "),
        ("secret-one\nsecret-two\n", "not a YAML list"),
        ("- [", "not a YAML list"),
        ("- secret-one", "key 1 is not an object with name and sha256"),
        ([{"name": "a", "sha256": DIGEST}, {"name": "a b", "sha256": DIGEST}], "key 2: name must be 1 to 64 letters"),
        ([{"name": "a", "sha256": "the key"}], "key 1: sha256 must be"),
        ([{"name": "a", "sha256": hashlib.sha256(b"").hexdigest()}], "key 1: sha256 must be"),
        ([{"name": "a"}], "key 1: sha256 must be"),
        ([{"name": "a", "sha256": DIGEST, "rpm": 3}], "key 1 has the unknown field 'rpm'; known: name, sha256, "),
        ([{"name": "a", "sha256": DIGEST, "requests_per_minute": 0}], "requests_per_minute=0 must be"),
        ([{"name": "a", "sha256": DIGEST, "tokens_per_minute": True}], "tokens_per_minute=True must be"),
        ([{"name": "a", "sha256": DIGEST, "priority": "high"}], "priority='high' must be"),
        ([{"name": "a", "sha256": DIGEST, "admin": "yes"}], "admin='yes' must be true or false"),
        ([{"name": "a", "sha256": DIGEST}] * 2, "two keys with the name a"),
        ([{"name": "a", "sha256": DIGEST}, {"name": "b", "sha256": DIGEST}], "two keys with the sha256"),
    ],
)
def test_the_error_of_an_invalid_file_is_one_line_without_any_key(tmp_path, entries, message):
    path = tmp_path / "keys"
    path.write_text(entries if isinstance(entries, str) else yaml.safe_dump(entries))
    with pytest.raises(ConfigError) as raised:
        read_api_keys(path)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert "secret" not in str(raised.value)
    assert "the key" not in str(raised.value).replace("of the key", "")


def test_a_file_that_is_not_there_or_empty_of_keys(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_api_keys(tmp_path / "nowhere")
    (tmp_path / "empty").write_text("[]")
    keys = ApiKeys((), tmp_path / "empty")
    assert keys
    assert keys.find("x") is None


def test_reloading_takes_the_new_file_and_keeps_the_old_keys_if_it_is_wrong(tmp_path, caplog):
    caplog.set_level(logging.INFO, "jaxis.server.http.api_keys")
    old = write_keys(tmp_path / "keys", alice={})
    keys = ApiKeys((), tmp_path / "keys")
    new = write_keys(tmp_path / "keys", bob={})
    keys.reload()
    assert (keys.find(old["alice"]), keys.find(new["bob"]).name) == (None, "bob")
    (tmp_path / "keys").write_text("- nonsense")
    keys.reload()
    assert keys.find(new["bob"]).name == "bob"
    assert "1 API keys read" in caplog.messages[0]
    assert "the API keys stay as they were: " in caplog.messages[1]
    ApiKeys(["given"]).reload()


def test_usage_is_counted_by_name_and_the_limit_on_requests_is_one_on_those_that_generate(serve, tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    texts = write_keys(tmp_path / "keys", alice={"requests_per_minute": 2}, bob={})
    server = serve(api_key_file=tmp_path / "keys", api_keys=("given",))
    prompt = [1] * 40  # more than a block, so that the second time finds it cached
    assert [ask(server, texts["alice"], prompt=prompt, cache_salt="x").status_code for _ in range(2)] == [200, 200]
    refused = ask(server, texts["alice"])
    assert refused.status_code == 429
    assert 20 <= int(refused.headers["retry-after"]) <= 30
    error = refused.json()["error"]
    assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
    assert error["message"].startswith("the key alice has used up its 2 requests per minute: try again in ")
    assert ask(server, texts["bob"], n=2).status_code == 200
    assert ask(server, "given").status_code == 200
    models = httpx.get(f"{server.url}/v1/models", headers={"x-api-key": texts["alice"]})
    assert models.status_code == 200
    counted = metrics(server, texts["bob"])
    assert counted['requests_total{api_key="alice"}'] == 2
    assert counted['rejections_total{api_key="alice",limit="requests"}'] == 1
    assert counted['prompt_tokens_total{api_key="alice"}'] == 80
    assert counted['prompt_tokens_cached_total{api_key="alice"}'] == 32
    assert counted['generation_tokens_total{api_key="alice"}'] == 10
    assert counted['generation_tokens_total{api_key="bob"}'] == 10
    assert counted['requests_total{api_key="default"}'] == 1
    documented = re.findall(r"`jaxis:api_key_(\w+)`", (REPOSITORY / "docs" / "operations.md").read_text())
    assert {name.partition("{")[0] for name in counted} == set(documented)
    page = httpx.get(f"{server.url}/metrics", headers={"Authorization": "Bearer given"}).text
    for text in texts.values():
        assert text not in caplog.text
        assert text not in page


def test_tokens_that_were_overdrawn_are_waited_for_also_in_a_stream(serve, tmp_path):
    texts = write_keys(tmp_path / "keys", alice={"tokens_per_minute": 60})
    server = serve(api_key_file=tmp_path / "keys")
    assert ask(server, texts["alice"], max_tokens=120, stream=True).status_code == 200
    refused = ask(server, texts["alice"])
    assert refused.status_code == 429
    assert 55 <= int(refused.headers["retry-after"]) <= 65  # a token a second, and more than 60 too many
    assert "its 60 tokens per minute" in refused.json()["error"]["message"]


def test_a_key_limits_the_priority_of_its_requests(serve, tmp_path, monkeypatch):
    texts = write_keys(tmp_path / "keys", low={"priority": 5}, free={})
    server = serve(api_key_file=tmp_path / "keys")
    seen = []
    generate = server.engine.generate

    def note_priority(*args, priority, **rest):
        seen.append(priority)
        return generate(*args, priority=priority, **rest)

    monkeypatch.setattr(server.engine, "generate", note_priority)
    for name, asked in (("low", -3), ("low", 9), ("free", -3)):
        assert ask(server, texts[name], priority=asked).status_code == 200
    assert seen == [5, 9, -3]


def test_requests_are_those_of_their_key_or_address(serve, built_engine, tmp_path, monkeypatch):
    texts = write_keys(tmp_path / "keys", ada={}, bob={})
    scheduler, seen = built_engine.engine.scheduler, []
    add_sequence = scheduler.add_sequence

    def note_client(sequence):
        seen.append(sequence.client)
        add_sequence(sequence)

    monkeypatch.setattr(scheduler, "add_sequence", note_client)
    server = serve(api_key_file=tmp_path / "keys", api_keys=("one", "two"))
    keys = (texts["ada"], texts["bob"], "one", "two")
    assert [ask(server, key).status_code for key in (*keys, "one")] == [200] * 5
    server.stop()
    assert ask(serve(), "any").status_code == 200
    assert len(set(seen[:4])) == 4, "keys given as options share a name"
    assert seen[4:] == [seen[2], "127.0.0.1"]
    assert [ApiKeys(("one", "two"), tmp_path / "keys").shown(client) for client in (*seen[:4], seen[5])] == [
        *("key ada", "key bob", "key default", "key default"),
        "127.0.0.1",
    ]


@pytest.mark.parametrize(("priority", "admin"), [(None, False), (0, True)])
def test_an_entry_is_what_is_read(priority, admin):
    _, key = new_api_key("alice", tokens_per_minute=9, priority=priority, admin=admin)
    assert [ApiKey(**entry) for entry in yaml.safe_load(to_yaml(key))] == [key]


def test_only_an_admin_key_empties_the_prefix_cache(serve, tmp_path):
    texts = write_keys(tmp_path / "keys", root={"admin": True}, alice={})
    server = serve(api_key_file=tmp_path / "keys", api_keys=("given",))

    def num_cached():
        answer = ask(server, texts["alice"], prompt=[1] * 40, cache_salt="reset").json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    def reset(**headers):
        return httpx.post(f"{server.url}/reset_prefix_cache", headers=headers)

    assert [num_cached(), num_cached()] == [0, 32]
    assert reset().status_code == 401
    for text in ("given", texts["alice"]):
        refused = reset(Authorization=f"Bearer {text}")
        assert (refused.status_code, refused.json()["error"]["type"]) == (403, "permission_error")
        assert "jaxis new-key --admin" in refused.json()["error"]["message"]
    assert num_cached() == 32
    done = reset(**{"x-api-key": texts["root"]})
    assert (done.status_code, done.json()) == (200, {"success": True})
    assert [num_cached(), num_cached()] == [0, 32]


def test_without_keys_no_client_can_empty_the_prefix_cache(serve):
    assert httpx.post(f"{serve().url}/reset_prefix_cache").status_code == 403
