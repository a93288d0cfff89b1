"""Requests that wait for their model, through every protocol and its own client; the model is the embedded one."""

import json

import pytest

from jaxis.errors import CheckpointError
from jaxis.server.http import sse
from tests.server.several.model_pools import FakeModel, serving_pool

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
BODIES = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 4, "stream": True},
    "/v1/completions": {"prompt": "Paris", "max_tokens": 4, "stream": True},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 4, "stream": True},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4, "stream": True},
    "/api/chat": {"messages": MESSAGES, "options": {"num_predict": 4}},
    "/api/generate": {"prompt": "Paris", "options": {"num_predict": 4}},
    "/completion": {"prompt": "Paris", "n_predict": 4, "stream": True},
}


@pytest.fixture
def shared_server_is_not_there(shared_server):
    shared_server.stop()


@pytest.fixture
def pool(built_engine, shared_server_is_not_there, monkeypatch):
    """A server of two models, one of them the embedded one; streams begin at once, and are never silent for long."""
    monkeypatch.setattr(sse, "FIRST_EVENT_SECONDS", 0.01)
    tiny, other = FakeModel("tiny", built=built_engine, needed_bytes=0), FakeModel("other", needed_bytes=0)
    with serving_pool(tiny, other, sse_keep_alive_seconds=0.02) as client:
        yield client, tiny, other


@pytest.mark.sampled(4)
@pytest.mark.parametrize("path", BODIES)
def test_a_stream_lives_while_its_model_loads_and_is_then_as_ever(pool, path):
    client, tiny, _ = pool
    body = {"model": "tiny", "temperature": 0, **BODIES[path]}
    if path.startswith("/api"):
        del body["temperature"]
        body["options"] = {**body["options"], "temperature": 0}
    tiny.may_load.clear()
    with client.http.stream("POST", path, json=body) as response:
        assert (response.status_code, response.headers["X-Jaxis-Load"]) == (200, "pending")
        lines = response.iter_lines()
        signs = [next(lines) for _ in range(6)]
        tiny.may_load.set()
        rest = list(lines)
    text = "\n".join(signs)
    if path.startswith("/api"):
        assert all(json.loads(line)["done"] is False for line in signs)
        assert {json.loads(line)["model"] for line in signs} == {"tiny"}
    else:
        assert ("ping" if path == "/v1/messages" else ": keep-alive") in text
    with client.http.stream("POST", path, json=body) as response:
        assert "X-Jaxis-Load" not in response.headers
        again = list(response.iter_lines())
    assert _texts(rest) == _texts(again) != ""


@pytest.mark.sampled(4)
@pytest.mark.parametrize("path", BODIES)
def test_a_stream_whose_model_cannot_be_loaded_ends_with_its_protocols_error(pool, path):
    client, _, other = pool
    other.may_load.clear()
    other.error = CheckpointError("config.json is missing")
    with client.http.stream("POST", path, json={"model": "other", **BODIES[path]}) as response:
        lines = response.iter_lines()
        signs = [next(lines) for _ in range(2)]
        other.may_load.set()
        text = "\n".join([*signs, *lines])
    assert text.count("the model 'other' cannot be loaded: config.json is missing") == 1
    last = json.loads(
        [line for line in text.splitlines() if line and line != "data: [DONE]"][-1].removeprefix("data: ")
    )
    assert "error" in last or last["type"] == "error"


def test_a_client_that_leaves_while_its_model_loads_leaves_nothing_behind(pool):
    client, tiny, _ = pool
    tiny.may_load.clear()
    body = {"model": "tiny", **BODIES["/v1/chat/completions"]}
    with client.http.stream("POST", "/v1/chat/completions", json=body) as response:
        next(response.iter_lines())
    tiny.may_load.set()
    client.wait_for("tiny", "loaded")
    assert client.http.post("/models/unload", json={"model": "tiny"}).json() == {"success": True}


def _texts(lines):
    """The answer's text in the lines of a stream."""
    texts = []
    for line in lines:
        data = line.removeprefix("data: ")
        if not data.startswith("{"):
            continue
        event = json.loads(data)
        choice = (event.get("choices") or [{}])[0]
        message = event.get("message") if isinstance(event.get("message"), dict) else {}
        delta = event.get("delta")
        found = (
            choice.get("text"),
            (choice.get("delta") or {}).get("content"),
            delta if isinstance(delta, str) else (delta or {}).get("text"),
            event.get("response") if isinstance(event.get("response"), str) else None,
            message.get("content") if isinstance(message.get("content"), str) else None,
            event.get("content") if isinstance(event.get("content"), str) else None,
        )
        texts += [text for text in found if text]
    return "".join(texts)
