"""Clients that mean harm, or are broken: refused in time, and no other client notices."""

import contextlib
import itertools
import json
import os
import resource
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPResponse

import httpx
import pytest
import tokenizers

from jaxis.server.http.strict_json import MAX_NESTING, parse_json
from jaxis.server.listener import allow_many_connections
from jaxis.tokenizer import Tokenizer
from tests.support.waiting import wait_until

JSON = {"Content-Type": "application/json"}
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
MESSAGES = b'{"max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}], '


def connect(server, payload=b"", receive_buffer=None):
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(30)
    connection.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
    connection.sendall(payload)
    return connection


def seconds_until_closed(connection):
    """Seconds for which the server holds a connection on which nothing more is sent; what it says is read."""
    start = time.monotonic()
    try:
        while connection.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return time.monotonic() - start


def test_json_is_read_as_the_standard_library_reads_it():
    for value in ({"a": [1, 2.5, None, True, "\U0001f600\n"], "b": {"a": {}}}, [], "x", 0):
        for escaped in (True, False):
            assert parse_json(json.dumps(value, ensure_ascii=escaped).encode()) == value
    deepest = b"[" * MAX_NESTING + b"]" * MAX_NESTING
    assert parse_json(deepest) == json.loads(deepest)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"prompt": "x", "max_tokens": 1, "max_tokens": 2}', "'max_tokens' twice"),
        (b'{"prompt": "x", "metadata": {"a": {"b": 1, "b": 1}}}', "'b' twice"),
        (MESSAGES + b'"chat_template_kwargs": {"a": ' + b"[" * 900 + b"]" * 900 + b"}}", "nested deeper"),
        (b'{"prompt": ' + b"[" * 500_000, "nested deeper"),
        (b'{"prompt": "x", "metadata": {"a": NaN}}', "NaN"),
        (b'{"prompt": "x", "metadata": {"a": "\\ud800"}}', "lone surrogate"),
        (b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}", "digits"),
        ('{"prompt": "x"}'.encode("utf-16"), "UTF-8"),
        (b'{"prompt": "x",}', "line 1, column 16"),
        *((body, "") for body in (b"{", b"[]", b"null", b'"x"', b"\xff")),
    ],
)
def test_json_that_readers_disagree_on_is_refused(http, body, message):
    path = "/v1/chat/completions" if body.startswith(MESSAGES) else "/v1/completions"
    response = http.post(path, content=body, headers=JSON)
    assert response.status_code == 400
    assert response.json()["error"].keys() == {"message", "type", "param", "code"}
    assert message in response.json()["error"]["message"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"n": 129}, "n"),
        ({"max_tokens": 2**63}, "max_tokens"),
        ({"repetition_penalty": 1e-308}, "repetition_penalty"),
        ({"repetition_penalty": 1e308}, "repetition_penalty"),
        ({"logit_bias": {str(i): 1 for i in range(10_000)}}, "logit_bias"),
        ({"logit_bias": {"7": 1, "07": -1}}, "logit_bias"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": "a" * 2000}, "stop"),
        ({"stop": [["a"]]}, "stop"),
        ({"prompt": ["a"] * 4097}, "prompt"),
        ({"prompt": "hello " * 100_000}, None),
    ],
)
def test_too_much_of_anything_is_a_bad_request(http, more, param):
    response = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1} | more)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_the_fault_of_a_union_is_that_of_the_branch_that_fits(http):
    response = http.post("/v1/completions", json={"prompt": ["a"] * 4097})
    assert "at most 4096" in response.json()["error"]["message"]


def test_a_prompt_that_cannot_fit_is_not_tokenized(http, monkeypatch):
    encode = tokenizers.Tokenizer.encode_batch_fast

    def encode_short(self, texts, **kwargs):
        assert len(texts[0]) < 1000
        return encode(self, texts, **kwargs)

    monkeypatch.setattr(tokenizers.Tokenizer, "encode_batch_fast", encode_short)
    text = "a b " * 1_700_000
    for path, body in (
        ("/v1/completions", {"prompt": text}),
        ("/v1/completions", {"prompt": ["short", text]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        ("/v1/responses", {"input": text}),
    ):
        response = http.post(path, json=body)
        assert response.status_code == 400
        assert "maximum context length is 2048 tokens" in response.json()["error"]["message"], path


def test_small_requests_pass_large_ones(server, http, monkeypatch):
    """There are as many large prompts as threads, each of which takes for ever."""
    encode, go_on, held = Tokenizer.encode, threading.Event(), []

    def slowly(self, text, **kwargs):
        if len(text) > 300_000:
            held.append(text)
            go_on.wait(60)
            return [1]
        return encode(self, text, **kwargs)

    monkeypatch.setattr(Tokenizer, "encode", slowly)
    with ThreadPoolExecutor(16) as pool:
        sizes = [400_000] * 8 + [2_000_000] * 4
        large = [
            pool.submit(httpx.post, f"{server.url}/tokenize", json={"prompt": "a" * size}, timeout=60) for size in sizes
        ]
        wait_until(lambda: len(held) >= 2)
        for _ in range(5):
            assert http.post("/tokenize", json={"prompt": "Hi"}).status_code == 200
            assert http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 1}).status_code == 200
        assert not any(answer.done() for answer in large)
        go_on.set()
        assert {answer.result().status_code for answer in large} == {200}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (b"".join(b"X-%d: y\r\n" % i for i in range(10_000)), b"431"),
        (b"Content-Length: -5\r\n", b"400"),
        (b"Content-Length: 5\r\nContent-Length: 6\r\n", b"400"),
        (b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", b"400"),
        (b"Transfer-Encoding: chunked, gzip\r\n", b"400"),
    ],
)
def test_headers_that_proxies_disagree_on_are_refused(server, headers, status):
    body = b'18\r\n{"prompt": "x", "n": 1   }\r\n0\r\n\r\n'
    head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with connect(server, head + headers + b"\r\n" + body) as connection:
        assert connection.recv(65536).split()[1] == status
    with connect(server, b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n") as connection:
        assert connection.recv(65536).split()[1] == b"431"


HEALTH_CHECKS = [b"OPTIONS /", b"OPTIONS /health", b"GET /health", b"HEAD /ping", b"GET /ready"]


HEADS = [
    (b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: 127.0.0.1\r\n", b"400"),
    (b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\n", b"400"),
    (b"GET /version HTTP/1.1\r\nHost: 127.0.0.1:8000@evil.example\r\n", b"400"),
    (b"GET /version HTTP/1.1\r\nHost: evil.example@127.0.0.1:8000\r\n", b"400"),
    (b"GET /version HTTP/1.1\r\nHost: 127.0.0.1/evil.example\r\n", b"400"),
    (b"GET http://evil.example/version HTTP/1.1\r\nHost: 127.0.0.1\r\n", b"400"),
    (b"GET http://127.0.0.1@evil.example/version HTTP/1.1\r\nHost: 127.0.0.1\r\n", b"400"),
    (b"GET http://evil.example/version HTTP/1.1\r\nHost: evil.example\r\n", b"403"),
    (b"GET http://evil.example/version HTTP/1.0\r\n", b"403"),
    (b"GET /version HTTP/1.1\r\n", b"403"),
    (b"GET http://127.0.0.1:8000/version HTTP/1.1\r\nHost: 127.0.0.1:8000\r\n", b"200"),
    (b"GET /version HTTP/1.1\r\nHost: [::1]:8000\r\n", b"200"),
    (b"GET /version HTTP/1.1\r\nHost: LocalHost\r\n", b"200"),
    (b"GET /version HTTP/1.1\r\nHost: localhost.:8000\r\n", b"200"),
    (b"GET /version HTTP/1.1\r\nHost: LLM.example.\r\n", b"200"),
    (b"GET /version HTTP/1.0\r\n", b"403"),
    (b"GET /version HTTP/1.1\r\nHost: 127.0.0.1.evil.example:8000\r\n", b"403"),
    (b"GET /version HTTP/1.1\r\nHost:\r\n", b"403"),
    # Health checks, as of HAProxy.
    *((b"%s HTTP/1.0\r\n" % check, b"200") for check in HEALTH_CHECKS),
    *((b"%s HTTP/1.0\r\nHost: evil.example\r\n" % check, b"403") for check in HEALTH_CHECKS),
]


def test_a_request_says_clearly_which_host_it_is_for(serve):
    server = serve(only_allowed_hosts=True, allowed_hosts=("llm.example:8000",))
    for head, status in HEADS:
        with connect(server, head + b"\r\n") as connection:
            response = HTTPResponse(connection, method=head.split()[0].decode())
            response.begin()
            answer = response.read()
        assert response.status == int(status), head
        assert (b"--allowed-hosts" in answer) == (status == b"403" and not head.startswith(b"HEAD")), head


def test_a_client_that_sends_too_much_before_it_reads_gets_its_answer(serve):
    server = serve(max_body_bytes=1_000_000)
    body = b"x" * 3_000_000
    head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    for headers, announced in itertools.product((b"", b"Connection: close\r\n"), (True, False)):
        length = b"Content-Length: %d\r\n" % len(body) if announced else b"Transfer-Encoding: chunked\r\n"
        framed = body if announced else b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        with connect(server, head + headers + length + b"\r\n" + framed) as connection:
            answer = b""
            while part := connection.recv(65536):
                answer += part
        assert answer.startswith(b"HTTP/1.1 413"), (headers, announced)
        assert answer.count(b"1000000 bytes") == 1


def test_a_body_that_never_ends_is_not_read_for_ever(serve):
    server = serve(max_body_bytes=10_000)
    head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"

    def send_on(connection):
        for _ in range(10_000):
            connection.sendall(b"x" * 10_000)

    with connect(server, head % 10**12) as connection, pytest.raises((BrokenPipeError, ConnectionResetError)):
        send_on(connection)


def test_what_can_be_got_can_be_asked_for_without_its_body(serve):
    server = serve()
    for path in ("/health", "/v1/models", "/v1/models/jaxis-tiny", "/version", "/metrics", "/openapi.json", "/"):
        got, asked = (send(server.url + path, timeout=60) for send in (httpx.get, httpx.head))
        assert (asked.status_code, asked.content) == (200, b""), path
        assert asked.headers["Content-Type"] == got.headers["Content-Type"]
    assert httpx.head(f"{server.url}/v1/completions").status_code == 405
    assert httpx.head(f"{server.url}/nowhere").status_code == 404
    assert 'method="HEAD"' in httpx.get(f"{server.url}/metrics").text


@pytest.mark.sampled(3)
@pytest.mark.parametrize("sent", [b"", HEALTH[:25], HEALTH + HEALTH[:9]])
def test_half_open_connections_are_closed(serve, sent):
    server = serve(idle_timeout_seconds=0.2)
    with connect(server, sent) as connection:
        assert 0.1 < seconds_until_closed(connection) < 25  # the server counts from a moment earlier


def test_headers_that_drip_in_are_cut_off(serve):
    server = serve(idle_timeout_seconds=0.2)
    with connect(server, b"GET /health HTTP/1.1\r\n") as connection:
        for _ in range(600):
            try:
                connection.sendall(b"X: y\r\n")
            except (BrokenPipeError, ConnectionResetError):
                return
            time.sleep(0.05)
    pytest.fail("headers that never end are read on and on")


def test_connections_in_use_are_kept(serve):
    server = serve(idle_timeout_seconds=0.2)
    with httpx.Client(base_url=server.url, limits=httpx.Limits(max_connections=1)) as http:
        start = time.monotonic()
        while time.monotonic() - start < 1.0:
            stream = http.get("/version").extensions["network_stream"]
            address = stream.get_extra_info("client_addr")
            time.sleep(0.05)
        body = {"prompt": "Once", "max_tokens": 600, "ignore_eos": True, "n": 8}
        assert http.post("/v1/completions", json=body, timeout=60).elapsed.total_seconds() > 0.2
        assert http.get("/version").extensions["network_stream"].get_extra_info("client_addr") == address


def test_more_connections_than_open_files_are_closed_and_the_server_recovers(serve):
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, most))
    try:
        allow_many_connections()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 1024 or most == 1024
        server = serve()
        httpx.get(f"{server.url}/health")
        num_open = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + 40, most))
        with contextlib.ExitStack() as connections:
            connect_often = (connections.enter_context(connect(server)) for _ in range(100))
            with pytest.raises(OSError, match="Too many open files"):
                list(connect_often)

        def is_well() -> bool:
            # The server, in this process, closes its ends a moment later.
            with contextlib.suppress(OSError, httpx.TransportError):
                return httpx.get(f"{server.url}/health").status_code == 200
            return False

        wait_until(is_well)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))


def test_a_body_that_drips_in_is_given_up(serve):
    server = serve(body_timeout_seconds=0.3)
    head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n"
    with connect(server, head) as connection:
        connection.settimeout(0.02)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            connection.sendall(b" ")
            try:
                answer = connection.recv(65536)
                break
            except TimeoutError:
                pass
    assert answer.startswith(b"HTTP/1.1 408")


def test_an_answer_that_is_not_read_is_dropped(serve, built_engine):
    """A large plain answer waits in the server's memory: not for ever."""
    server = serve(idle_timeout_seconds=0.2)
    body = json.dumps({"prompt": "a " * 400_000}).encode()
    head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    with connect(server, head % len(body) + body, receive_buffer=4096) as connection:
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        connections = server.uvicorn.server_state.connections
        deadline = time.monotonic() + 10
        while connections:
            assert time.monotonic() < deadline
            time.sleep(0.02)
