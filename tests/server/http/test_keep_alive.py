"""Streams are never silent for long: before the first token, while a model compiles, and when something then fails."""

import contextlib
import json
import threading

import httpx
import openai
import pytest

from jaxis.engine.execution.programs import Programs
from jaxis.errors import EngineError, RequestError
from jaxis.server.http import sse
from jaxis.tokenizer import Tokenizer
from tests.support.scripted_engine import ScriptedEngine, connected

MESSAGES = [{"role": "user", "content": "Hi"}]
BODIES = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
}
SILENCE_SECONDS = 0.05


@pytest.fixture
def engine(monkeypatch):
    """Starts to answer after several times the silence that is allowed."""
    monkeypatch.setattr(sse, "FIRST_EVENT_SECONDS", SILENCE_SECONDS)
    engine = ScriptedEngine()
    engine.text, engine.delay_seconds = "Yes.", 8 * SILENCE_SECONDS
    return engine


@pytest.fixture
def client(engine):
    with connected(engine, sse_keep_alive_seconds=SILENCE_SECONDS) as client:
        yield client


def raw_stream(client, path):
    response = client.http.post(path, json={**BODIES[path], "stream": True})
    assert response.status_code == 200, response.text
    return response.text


def events_of(text):
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_comments_come_before_the_answer(client, path):
    text = raw_stream(client, path)
    lines = text.split("\n\n")
    num_comments = lines.index(next(line for line in lines if line.startswith("data")))
    assert lines[:num_comments] == [": keep-alive"] * num_comments
    assert num_comments >= 2
    assert lines[-2:] == ["data: [DONE]", ""]


def test_clients_read_over_the_comments(client):
    chunks = client.chat.completions.create(model="jaxis-tiny", messages=MESSAGES, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Yes."
    chunks = client.completions.create(model="jaxis-tiny", prompt="Hi", stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Yes."


def test_responses_begin_and_then_send_events_that_count(client):
    events = events_of(raw_stream(client, "/v1/responses"))
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["response.created", "response.in_progress", "keepalive"]
    assert kinds.count("response.created") == 1
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    with client.responses.stream(model="jaxis-tiny", input="Hi") as stream:
        assert stream.get_final_response().output_text == "Yes."


def test_a_pause_within_the_answer_is_filled_too(engine, client):
    engine.delay_seconds, engine.pause_seconds = 0.0, 4 * SILENCE_SECONDS
    text = raw_stream(client, "/v1/chat/completions")
    assert text.startswith("data: ")
    assert ": keep-alive" in text
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events_of(text)) == "Yes."


def test_an_interval_of_zero_sends_nothing(engine):
    with connected(engine, sse_keep_alive_seconds=0.0) as client:
        assert ": keep-alive" not in raw_stream(client, "/v1/chat/completions")


@pytest.mark.parametrize("path", BODIES)
def test_an_error_that_is_quick_keeps_its_status(engine, client, path):
    engine.delay_seconds, engine.error = 0.0, RequestError("no")
    response = client.http.post(path, json={**BODIES[path], "stream": True})
    assert (response.status_code, response.json()["error"]["message"]) == (400, "no")


def test_a_late_error_is_in_the_stream_in_the_protocols_form(engine, client):
    engine.error = EngineError("out of memory")
    for path in ("/v1/chat/completions", "/v1/completions"):
        text = raw_stream(client, path)
        assert events_of(text)[-1]["error"]["message"] == "out of memory"
        assert text.endswith("data: [DONE]\n\n")
    with pytest.raises(openai.APIError, match="out of memory"):
        list(client.chat.completions.create(model="jaxis-tiny", messages=MESSAGES, stream=True))
    *_, last = client.responses.create(model="jaxis-tiny", input="Hi", stream=True)
    assert last.type == "response.failed"
    assert (last.response.status, last.response.error.code) == ("failed", "engine_error")
    assert last.response.error.message == "out of memory"


def test_a_prompt_that_is_too_long_says_so_in_the_words_that_clients_look_for(engine, client, monkeypatch):
    long = "x" * (engine.info.max_model_len + 1)
    for path, body in BODIES.items():
        for stream in (False, True):
            body = json.loads(json.dumps(body).replace("Hi", long))
            response = client.http.post(path, json={**body, "stream": stream})
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
            assert "maximum context length is 1000 tokens" in error["message"]
    # A stream that has begun fails with the same code: its prompt is tokenized once its headers are sent.
    begun, encode, send = threading.Event(), Tokenizer.encode, sse.EventStreamResponse._send_all

    def send_all(*args):
        begun.set()
        return send(*args)

    monkeypatch.setattr(sse.EventStreamResponse, "_send_all", send_all)
    monkeypatch.setattr(Tokenizer, "encode", lambda *args, **more: begun.wait(60) and encode(*args, **more))
    *_, last = client.responses.create(model="jaxis-tiny", input=long, stream=True)
    assert (last.type, last.response.error.code) == ("response.failed", "context_length_exceeded")


@pytest.fixture
def compiling(built_engine, monkeypatch):
    """An engine that waits for a program until the event is set."""
    monkeypatch.setattr(sse, "FIRST_EVENT_SECONDS", SILENCE_SECONDS)
    finish = threading.Event()
    runner = built_engine.engine.runner

    compile_now = runner.executor.compile

    def compile_slowly(key):
        finish.wait(60)
        return compile_now(key)

    monkeypatch.setattr(runner.executor, "compile", compile_slowly)
    monkeypatch.setattr(runner, "programs", Programs(runner.executor, lambda _: contextlib.nullcontext()))
    yield finish
    finish.set()


@pytest.mark.parametrize("leaves", [False, True])
def test_a_client_can_wait_for_a_program_to_compile_or_leave(serve, compiling, leaves):
    server = serve(sse_keep_alive_seconds=SILENCE_SECONDS)
    body = {"prompt": "x", "max_tokens": 3, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as response:
        lines = (line for line in response.iter_lines() if line)
        assert [next(lines) for _ in range(3)] == [": keep-alive"] * 3
        if not leaves:
            compiling.set()
            rest = [line for line in lines if line != ": keep-alive"]
            assert len(rest) >= 2
            assert rest[-1] == "data: [DONE]"
    compiling.set()
    server.wait_until_idle()
