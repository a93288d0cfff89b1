"""Traces, as a collector gets them."""

import http.server
import logging
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from typer.testing import CliRunner

from jaxis.cli.main import app

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def collector():
    """A collector; yields its address and the (path, spans' resource, span) that it got."""
    received = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                names = values(resource.resource.attributes)
                received.extend((self.path, names, span) for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", received
    server.shutdown()
    server.server_close()


def values(attributes):
    """OTLP's attributes as Python values."""
    found = {}
    for attribute in attributes:
        kind = attribute.value.WhichOneof("value")
        value = getattr(attribute.value, kind)
        found[attribute.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return found


def test_a_request_is_a_span_with_its_times_below_that_of_its_client(serve, collector):
    url, received = collector
    server = serve(otlp_traces_endpoint=url)
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
    chat = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
    begin = time.time()
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=chat, headers=headers).json()
    end = time.time()
    body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 5, "ignore_eos": True, "seed": 2**64 - 1, "stream": True}
    assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200
    refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": list(range(3000))}).status_code
    assert refused == 400
    server.stop()  # which sends what is left

    assert {(path, names["service.name"]) for path, names, _ in received} == {("/v1/traces", "jaxis")}
    spans = [span for _, _, span in received]
    [span] = [span for span in spans if span.trace_id.hex() == TRACE_ID and span.parent_span_id.hex() == PARENT_ID]
    assert (span.name, span.status.code) == ("chat jaxis-tiny", 0)
    attributes = values(span.attributes)
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "jaxis-tiny",
        "gen_ai.request.temperature": 0.0,
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": answer["usage"]["completion_tokens"],
    }
    assert expected.items() <= attributes.items()
    assert attributes["gen_ai.request.id"].startswith(answer["id"])
    assert not [value for value in attributes.values() if "capital" in str(value) or "Paris" in str(value)]

    phases = {s.name: s for s in spans if s.parent_span_id == span.span_id}
    assert set(phases) == {"queue", "prefill", "decode"}
    times = [phases["queue"].start_time_unix_nano]
    for name, attribute in (
        ("queue", "time_in_queue"),
        ("prefill", "time_in_model_prefill"),
        ("decode", "time_in_model_decode"),
    ):
        phase = phases[name]
        assert phase.start_time_unix_nano == pytest.approx(times[-1], abs=1e5)  # each begins where the last ended
        seconds = (phase.end_time_unix_nano - phase.start_time_unix_nano) / 1e9
        assert seconds == pytest.approx(attributes[f"gen_ai.latency.{attribute}"], abs=1e-6)
        times.append(phase.end_time_unix_nano)
    assert begin <= span.start_time_unix_nano / 1e9 + 0.01
    assert times == sorted(times)
    assert span.start_time_unix_nano <= times[0]
    assert times[-1] <= span.end_time_unix_nano <= (end + 0.01) * 1e9

    others = [span for span in spans if span.name == "text_completion jaxis-tiny"]
    assert len({span.trace_id for span in others} | {bytes.fromhex(TRACE_ID)}) == 4  # each begins a trace of its own
    completed = [values(span.attributes) for span in others if not span.status.code]
    assert [(a["gen_ai.usage.output_tokens"], a["gen_ai.response.finish_reasons"]) for a in completed] == [
        (10, ["length"] * 2)
    ] * 2
    assert completed[0]["gen_ai.request.seed"] == str(2**64 - 1)
    [failed] = [span for span in others if span.status.code]
    assert values(failed.attributes)["error.type"] == "ContextLengthError"


def test_without_a_collector_requests_are_answered_and_the_server_ends(serve, caplog):
    caplog.set_level(logging.CRITICAL, "opentelemetry")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
    server = serve(otlp_traces_endpoint=url)
    assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200
    begin = time.monotonic()
    server.stop()
    assert time.monotonic() - begin < 15


@pytest.mark.parametrize("endpoint", ["localhost:4318", "grpc://localhost:4317", "http://", ""])
def test_an_endpoint_that_is_no_address_is_an_error_of_one_line(endpoint, monkeypatch):
    monkeypatch.setattr("jaxis.engine.setup.build_engine", lambda *_: pytest.fail("loaded"))
    result = CliRunner().invoke(app, ["serve", "--port", "0", "--otlp-traces-endpoint", endpoint])
    assert result.exit_code == 1
    [line] = result.stderr.strip().splitlines()
    assert "http://localhost:4318" in line


def test_without_the_extra_the_option_says_how_to_get_it(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "opentelemetry"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "jaxis.server.observability.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    result = CliRunner().invoke(app, ["serve", "--port", "0", "--otlp-traces-endpoint", "http://localhost:4318"])
    assert result.exit_code == 1
    [line] = result.stderr.strip().splitlines()
    assert "pip install 'jaxis[otel]'" in line


def test_a_server_without_traces_does_not_import_what_writes_them():
    modules = ["opentelemetry.sdk", "opentelemetry.exporter", "aiohttp"]  # fastapi imports opentelemetry itself
    script = f"""
import sys, jaxis.cli.serve, jaxis.server.app
print([name for name in {modules} if name in sys.modules])"""
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert output == "[]\n"
