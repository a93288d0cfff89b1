"""Requests that are admitted, those that are too large, and those whose client disconnects."""

import gzip
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

CHAT = {"messages": [{"role": "user", "content": "Tell me a story."}]}
ENDLESS = {"prompt": "Once upon a time", "max_tokens": 2000, "ignore_eos": True}


def send_raw(server, payload):
    """A connection on which bytes were sent."""
    connection = socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=30)
    connection.sendall(payload)
    return connection


def post(path, body, headers=""):
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    return f"{head}{headers}\r\n".encode() + data


def wait_until_running(server):
    deadline = time.monotonic() + 20
    while server.engine.stats().num_requests_running == 0:
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize(
    ("headers", "body", "message"),
    [
        ({"Content-Type": "application/x-www-form-urlencoded"}, b"{}", "send Content-Type: application/json"),
        # Which a browser sends for another page without asking first.
        ({"Content-Type": "text/plain"}, b"{}", "send Content-Type: application/json"),
        ({"Content-Type": "multipart/form-data; boundary=x"}, b"--x--", "send Content-Type: application/json"),
        ({}, b"{}", "must be application/json, and there is none"),
        ({"Content-Type": "application/jsonx"}, b"{}", "it is 'application/jsonx'"),
        ({"Content-Type": "application/json; charset=utf-16"}, "{}".encode("utf-16"), "names charset=utf-16"),
        ({"Content-Type": "application/json"}, "{}".encode("utf-16"), "the body is text in UTF-16"),
        (
            {"Content-Type": "application/json", "Content-Encoding": "gzip"},
            gzip.compress(b"{}", mtime=0),
            "Content-Encoding: gzip",
        ),
        ({"Content-Type": "application/json"}, gzip.compress(b"{}", mtime=0), "compressed by gzip"),
        ({"Content-Type": "application/json"}, b" ", "the body is empty"),
        ({"Content-Type": "application/json"}, b"", "the body is empty"),
    ],
)
def test_what_is_wrong_with_a_bodys_wrapping_is_named(http, headers, body, message):
    origin = {"Origin": "null"}  # with which Ollama's routes read the header
    for path in ("/v1/chat/completions", "/v1/messages", "/tokenize", "/api/chat"):
        answer = http.post(path, content=body, headers=headers | origin)
        error = answer.json()["error"]
        assert answer.status_code == 400, path
        assert message in (error if isinstance(error, str) else error["message"]), path


@pytest.mark.parametrize(
    "content_type", ["application/json", "Application/JSON; charset=UTF-8", 'application/ld+json; charset="utf-8"']
)
def test_json_is_json_under_any_of_its_names(http, content_type):
    answer = http.post("/tokenize", content=b'{"prompt": "a"}', headers={"Content-Type": content_type})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("GET", "/v1/completions", 405, "does not take GET: use POST"),
        ("PUT", "/v1/responses/a", 405, "use DELETE, GET"),
        ("GET", "/api/chat", 405, "does not take GET: use POST"),
        ("GET", "/v2/completions", 404, "there is no '/v2/completions' here: did you mean /v1/completions?"),
        ("POST", "/chat/completions", 404, "/v1 is missing, call /v1/chat/completions"),
        ("GET", "/models/", 404, "did you mean"),
        ("POST", "/messages", 404, "/v1 is missing, call /v1/messages"),
        ("POST", "/v1/v1/messages", 404, "did you mean /v1/messages?"),
        ("POST", "/openai/v1/chat/completions", 404, "did you mean /v1/chat/completions?"),
        ("POST", "/v1/chat/completions/", 404, "did you mean /v1/chat/completions?"),
        ("POST", "/v1/chat/completion", 404, "did you mean /v1/chat/completions?"),
        ("GET", "/v1/models/", 404, "did you mean /v1/models?"),
        ("GET", "/zzzzz", 404, "/openapi.json lists what there is"),
    ],
)
def test_an_unknown_path_or_method_names_what_is_known(http, method, path, status, message):
    answer = http.request(method, path)
    error = answer.json()["error"]
    assert answer.status_code == status
    assert message in (error if isinstance(error, str) else error["message"])
    assert ("allow" in answer.headers) == (status == 405)


def test_request_id_is_the_clients_if_decent(http):
    assert http.get("/version", headers={"X-Request-Id": "abc-1"}).headers["X-Request-Id"] == "abc-1"
    assert http.get("/version", headers={"X-Request-Id": "a b"}).headers["X-Request-Id"] != "a b"


def test_overload_is_refused_before_preprocessing_with_a_time_to_retry(serve):
    server = serve(max_queued=0)  # 8 can run
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:

        def ask(_):
            try:
                return client.chat.completions.create(model="jaxis-tiny", max_tokens=200, n=2, **CHAT)
            except openai.RateLimitError as error:
                return error

        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(ask, range(16)))
    refused = [answer for answer in answers if isinstance(answer, openai.RateLimitError)]
    assert {(error.code, error.response.headers["Retry-After"]) for error in refused} == {("server_overloaded", "1")}
    good = [answer for answer in answers if answer not in refused]
    assert len(good) >= 4
    assert len({choice.message.content for answer in good for choice in answer.choices}) == 1  # greedy
    server.wait_until_idle()


def test_more_than_the_server_holds_is_a_bad_request(serve):
    server = serve(max_queued=0)
    response = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "n": 9})
    assert response.status_code == 400
    assert "at most 8" in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", ["Once upon a time", ["Once upon a time"] * 3])
def test_a_client_that_leaves_gives_its_blocks_back(server, stream, prompts):
    payload = post("/v1/completions", {**ENDLESS, "prompt": prompts, "stream": stream})
    connection = send_raw(server, payload)
    wait_until_running(server)
    connection.close()
    server.wait_until_idle(5)


def test_a_client_that_does_not_read_is_cut_off(serve):
    server = serve(write_timeout_seconds=0.3)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
    body = {**ENDLESS, "stream": True, "logprobs": 20, "n": 8}
    connection.sendall(post("/v1/completions", body))
    wait_until_running(server)
    server.wait_until_idle(20)
    response = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 1})
    assert response.status_code == 200
    connection.close()


def test_a_request_that_takes_too_long_is_aborted(serve):
    server = serve(request_timeout_seconds=0.05)
    response = httpx.post(f"{server.url}/v1/completions", json=ENDLESS, timeout=30)
    assert response.status_code == 504
    assert "0.05 s" in response.json()["error"]["message"]
    server.wait_until_idle(5)


def test_drain_ends_what_runs_with_a_word(serve):
    server = serve(drain_seconds=0.2)
    lines = []

    def read():
        with httpx.stream("POST", f"{server.url}/v1/completions", json={**ENDLESS, "stream": True, "n": 8}) as response:
            lines.extend(response.iter_lines())

    reader = threading.Thread(target=read)
    reader.start()
    wait_until_running(server)
    server.stop()
    reader.join(10)
    data = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert data[-1]["error"]["code"] == "server_unavailable"
    assert lines[-2] == "data: [DONE]"


def test_short_requests_end_during_drain(serve):
    server = serve(drain_seconds=20.0)
    answers = []
    body = {**ENDLESS, "max_tokens": 100}
    thread = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=30))
    )
    thread.start()
    wait_until_running(server)
    server.stop()
    thread.join(10)
    assert answers[0].json()["usage"]["completion_tokens"] == 100
