"""Faults inside: every client is told, in an error object, and the server goes on."""

import contextlib
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from jaxis.engine.execution.programs import Programs
from jaxis.errors import EngineError
from tests.support.waiting import a_minute_later

ENDLESS = {"prompt": "Once", "max_tokens": 2000, "ignore_eos": True}


@pytest.mark.parametrize("stream", [False, True])
def test_a_fault_in_the_server_is_answered_without_details(server, http, stream, monkeypatch):
    def fail(*_):
        raise ValueError("a secret path")

    monkeypatch.setattr(server.engine, "reserve", fail)
    response = http.post("/v1/completions", json={"prompt": "x", "stream": stream})
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.text
    monkeypatch.undo()
    assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200


def test_a_failing_tokenizer_fails_its_request(server, http, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("the tokenizer broke")

    with monkeypatch.context() as patch:
        patch.setattr("jaxis.tokenizer.Tokenizer.encode", fail)
        assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 500
    assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
    server.wait_until_idle()


def test_a_failed_step_is_an_error_in_the_stream_and_the_server_goes_on(built_engine, server, http, monkeypatch):
    events = []
    with httpx.stream("POST", f"{server.url}/v1/completions", json={**ENDLESS, "stream": True}, timeout=30) as response:
        lines = response.iter_lines()
        events.append(next(lines))
        with monkeypatch.context() as patch:
            patch.setattr(built_engine.engine.runner, "dispatch", _raise)
            events += [line for line in lines if line]
    assert "out of memory" in json.loads(events[-2][6:])["error"]["message"]
    assert events[-1] == "data: [DONE]"
    assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
    assert http.get("/health").status_code == 200
    server.wait_until_idle()


def test_a_stall_fails_health_and_recovery_mends_it(serve, built_engine, monkeypatch):
    server = serve(stall_seconds=0.1, request_timeout_seconds=1.0)
    release = threading.Event()
    step = built_engine.engine.step

    def stall():
        release.wait(20)
        return step()

    with httpx.Client(base_url=server.url, timeout=30) as http:
        with monkeypatch.context() as patch:
            patch.setattr(built_engine.engine, "step", stall)
            assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 504
            assert http.get("/health").status_code == 503
            assert http.get("/ready").status_code == 503
            release.set()
        deadline = time.monotonic() + 10
        while http.get("/health").status_code != 200:
            assert time.monotonic() < deadline
        server.wait_until_idle()


def test_a_failing_chat_template_is_the_requests_fault(server, http, monkeypatch):
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    with monkeypatch.context() as patch:
        patch.setattr("jaxis.tokenizer.Tokenizer.choose_chat_template", lambda *_: "{{ 1 / 0 }}")
        response = http.post("/v1/chat/completions", json=body)
        assert response.status_code == 400
        assert "the chat template refused the conversation" in response.json()["error"]["message"]
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    server.wait_until_idle()


@pytest.mark.parametrize(("name", "status"), [("self", 400), ("template", 200), ("tokenizer", 400), ("where", 200)])
def test_template_arguments_of_any_name(http, name, status):
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "chat_template_kwargs": {name: 1}}
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == status, response.text
    assert (
        http.post("/tokenize", json={name: body[name] for name in ("messages", "chat_template_kwargs")}).status_code
        == status
    )


def test_a_failing_detokenizer_fails_its_step_and_the_server_goes_on(server, http, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("jaxis.engine.output_processor.CompletionState.add_token", lambda *_: 1 / 0)
        assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 500
    assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
    server.wait_until_idle()


def test_steps_that_always_fail_fail_health_until_one_does_not(built_engine, server, http, monkeypatch):
    health = []
    with monkeypatch.context() as patch:
        patch.setattr(built_engine.engine.runner, "dispatch", _raise)
        for _ in range(3):
            response = http.post("/v1/completions", json={"prompt": "x"})
            assert response.status_code == 500
            assert "out of memory" in response.json()["error"]["message"]
            health.append(http.get("/health").status_code)
    assert health == [200, 200, 503]
    assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
    assert http.get("/health").status_code == 200
    server.wait_until_idle()


def test_an_engine_that_cannot_recover_ends_the_server(built_engine, serve, monkeypatch):
    server = serve()
    runner = built_engine.engine.runner
    recover = runner.recover
    with monkeypatch.context() as patch:
        patch.setattr(runner, "dispatch", _raise)
        patch.setattr(runner, "recover", lambda: 1 / 0)
        response = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"})
        assert response.status_code == 503
        assert "must be restarted" in response.json()["error"]["message"]
        server.thread.join(30)
        assert not server.thread.is_alive()
        assert "division by zero" in str(server.engine.failure)
    recover()


def test_compiling_is_no_stall(serve, built_engine, monkeypatch):
    server = serve(stall_seconds=0.1)
    runner = built_engine.engine.runner
    compiling, finish = threading.Event(), threading.Event()

    compile_now = runner.executor.compile

    def compile_slowly(key):
        compiling.set()
        finish.wait(60)
        return compile_now(key)

    monkeypatch.setattr(runner.executor, "compile", compile_slowly)
    monkeypatch.setattr(runner, "programs", Programs(runner.executor, lambda _: contextlib.nullcontext()))
    with httpx.Client(base_url=server.url, timeout=30) as http, ThreadPoolExecutor() as pool:
        answer = pool.submit(http.post, "/v1/completions", json={"prompt": "x", "max_tokens": 1})
        assert compiling.wait(10)
        with a_minute_later(monkeypatch):
            assert http.get("/health").status_code == 200
        assert not answer.done()
        finish.set()
        assert answer.result().status_code == 200
    assert runner.programs.last_wait.ended - runner.programs.last_wait.started > 0


def _raise(*_, **__):
    raise EngineError("out of memory")
