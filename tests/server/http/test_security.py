"""Classes of holes that inference servers have had: none is open here. docs/operations.md lists them."""

import ast
import inspect
import json
import shutil
import socket
from pathlib import Path

import httpx
import pytest

import jaxis
from jaxis.cli.serve_options import ServerOptions
from jaxis.engine.arguments import EngineArgs
from jaxis.engine.opened_model import EMBEDDED_MODEL
from jaxis.engine.setup import build_engine
from jaxis.host.progress import ProgressDisplay
from jaxis.server.http import api_keys

SOURCES = sorted(Path(jaxis.__path__[0]).rglob("*.py"))
RUNS_WHAT_IT_READS = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "multiprocessing"}
# The hub is asked for what the user names on the command line.
FETCHES = {
    "requests": set(),
    "httpx": set(),
    "urllib.request": set(),
    "aiohttp": set(),
}
MESSAGES = [{"role": "user", "content": "Hi"}]


def imports(source):
    for node in ast.walk(ast.parse(source.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def test_nothing_is_unpickled_and_nothing_fetched():
    for source in SOURCES:
        for module in imports(source):
            assert module.partition(".")[0] not in RUNS_WHAT_IT_READS, source
            where = source.relative_to(jaxis.__path__[0]).as_posix()
            assert where in FETCHES.get(module, {where}), (where, module)


def test_no_source_evaluates_text():
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec", "compile", "__import__"), source
            assert not (isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "trust_remote_code")), source


def test_a_checkpoints_code_is_never_run(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(EMBEDDED_MODEL, folder)
    code = f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n"
    for name in ("modeling_evil", "tokenization_evil", "configuration_evil"):
        (folder / f"{name}.py").write_text(code)
    for name, auto_map in (
        ("config.json", {"AutoConfig": "configuration_evil.C", "AutoModelForCausalLM": "modeling_evil.M"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["tokenization_evil.T", None]}),
    ):
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(settings | {"auto_map": auto_map}))
    built = build_engine(EngineArgs(str(folder), kv_cache_memory="4MiB"), ProgressDisplay(False))
    assert built.engine.tokenizer.encode("Hi")
    built.engine.close()
    assert not (tmp_path / "ran").exists()


def test_only_this_machine_can_connect_unless_told_otherwise():
    assert ServerOptions().host == "127.0.0.1"


def test_keys_are_compared_in_constant_time():
    assert "hmac.compare_digest" in inspect.getsource(api_keys.ApiKeys.find)


def test_every_route_of_the_application_is_closed_with_a_key(serve):
    server = serve(api_keys=("secret",))
    key = {"Authorization": "Bearer secret"}
    document = httpx.get(f"{server.url}/openapi.json", headers=key, timeout=60).json()
    paths = [*document["paths"], "/openapi.json", "/docs", "/v1", "/v1/", "/V1/models", "//v1/models", "/v1/models/"]
    paths += ["/health/", "/health/../v1/models", "/%76%31/models", "/health%2f..%2fv1/models", "/health/../metrics"]
    for path in paths:
        with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=30) as connection:
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            status = connection.recv(4096).split()[1]
        assert status == (b"200" if path in api_keys.OPEN_PATHS else b"401"), path
    wrong = ("", "secret", "Bearer", "Bearer secre", "Basic secret"), ("", "secre", "Bearer secret", "secret secret")
    with httpx.Client(base_url=server.url, timeout=60) as http:
        for name, good, bad in zip(("Authorization", "X-Api-Key"), ("Bearer secret", "secret"), wrong, strict=True):
            found = {value: http.get("/v1/models", headers={name: value}) for value in (good, *bad)}
            assert {value for value, answer in found.items() if answer.status_code == 200} == {good}
            assert {answer.json()["error"]["code"] for value, answer in found.items() if value != good} == {
                "invalid_api_key"
            }


def test_no_address_in_a_request_is_ever_visited(server, http):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/x"
        schema = {"type": "object", "properties": {"a": {"$ref": f"{address}.json"}}, "required": ["a"]}
        image = {"type": "image_url", "image_url": {"url": address}}
        chat = {"messages": MESSAGES, "max_tokens": 1}
        refused = [
            {**chat, "messages": [{"role": "user", "content": [image]}]},
            {**chat, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
            {**chat, "tools": [{"type": "mcp", "server_url": address}]},
        ]
        for body in refused:
            assert http.post("/v1/chat/completions", json=body).status_code == 400
        http.post("/v1/chat/completions", json={**chat, "chat_template_kwargs": {"image": address}, "user": address})
        http.post("/v1/completions", json={"prompt": address, "max_tokens": 1})
        with pytest.raises(TimeoutError):
            listener.accept()


@pytest.mark.parametrize("name", ["prompt_embeds", "lora_path", "chat_template", "logits_processors"])
def test_no_field_takes_tensors_code_or_files(http, name):
    response = http.post("/v1/completions", json={"prompt": "x", name: "x"})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "unsupported_parameter")


def test_no_field_makes_a_server_ask_another_one_unless_it_was_started_for_that(http):
    params = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 9}
    response = http.post("/v1/completions", json={"prompt": "x", "kv_transfer_params": params})
    assert response.status_code == 400
    assert "kv_transfer_params needs an engine with kv_transfer_config" in response.text


NESTED = {"type": "string"}
for _ in range(30):
    NESTED = {"type": "object", "properties": {"a": NESTED}, "required": ["a"]}


@pytest.mark.sampled
@pytest.mark.parametrize(
    "grammar",
    [
        {"regex": "(a+)+$" * 50},
        {"regex": "((((a{1,100}){1,100}){1,100}){1,100})"},
        {"regex": "(" * 2000},
        {"regex": "[^\\s\\S]"},
        {"grammar": 'start: start "a"'},
        {"grammar": 'start: start start | "a"'},
        {"json": {"$ref": "#"}},
        {"json": {"$ref": "file:///etc/passwd"}},
        {"json": {"anyOf": [{"type": "object", "properties": {f"p{i}": {"type": "integer"}}} for i in range(2000)]}},
        {"json": {"type": "array", "items": {"type": "string"}, "minItems": 10**8, "maxItems": 10**9}},
        {"json": NESTED},
        {"choice": [f"option {i}" for i in range(100_000)]},
    ],
    ids=lambda grammar: str(grammar)[:40],
)
def test_a_grammar_that_is_an_attack_fails_or_runs_alone(server, http, grammar):
    before = http.post("/v1/completions", json={"prompt": "The capital of France is", "max_tokens": 4}).json()
    body = {"messages": MESSAGES, "max_tokens": 4, "structured_outputs": grammar}
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code in (200, 400)
    assert response.elapsed.total_seconds() < 10
    after = http.post("/v1/completions", json={"prompt": "The capital of France is", "max_tokens": 4}).json()
    assert after["choices"] == before["choices"]
    assert http.get("/health").status_code == 200
