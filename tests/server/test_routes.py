"""The routes beside the completions, CORS, metrics and logs."""

import json
import logging
import time

import httpx
import pytest

from jaxis.host.logs import JsonFormatter
from jaxis.version import __version__

MESSAGES = [{"role": "user", "content": "Hi"}]


def test_models_are_the_served_names(serve):
    server = serve(served_model_names=("one", "two/three"))
    with httpx.Client(base_url=server.url) as http:
        cards = http.get("/v1/models").json()["data"]
        assert [card["id"] for card in cards] == ["one", "two/three"]
        assert http.get("/v1/models/two/three").json()["max_model_len"] == server.engine.info.max_model_len
        assert http.get("/v1/models/four").status_code == 404
        for name in ("one", "two/three"):
            answer = http.post("/v1/completions", json={"model": name, "prompt": "x", "max_tokens": 1}).json()
            assert answer["model"] == "one"


def test_tokenize_is_the_tokenizers(built_engine, http):
    tokenizer = built_engine.engine.tokenizer
    answer = http.post("/tokenize", json={"prompt": "Paris is", "return_token_strs": True}).json()
    assert answer["tokens"] == tokenizer.encode("Paris is")
    assert answer["count"] == len(answer["tokens"])
    assert "".join(answer["token_strs"]) == "Paris is"
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "Paris is"}


def test_tokenize_of_a_conversation_is_what_a_chat_costs(built_engine, http):
    tokens = http.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"]
    assert tokens == built_engine.engine.tokenizer.encode_chat(MESSAGES)
    usage = http.post("/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 1}).json()["usage"]
    assert usage["prompt_tokens"] == len(tokens)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, None),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, None),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": ["x"]}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_bad_texts_are_refused(http, path, body, param):
    response = http.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_version_and_openapi(http):
    assert http.get("/version").json() == {"version": __version__}
    paths = http.get("/openapi.json").json()["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/tokenize", "/health", "/metrics"} <= set(paths)


def metrics_of(http):
    lines = http.get("/metrics").text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


def test_metrics_count_what_happened(http):
    label = '{model_name="jaxis-tiny"}'
    before = metrics_of(http)
    body = {"prompt": [400, 401, 402], "max_tokens": 5, "ignore_eos": True, "n": 2}
    assert http.post("/v1/completions", json=body).status_code == 200
    after = metrics_of(http)

    def change(name, labels=label):
        return after[f"jaxis:{name}{labels}"] - before.get(f"jaxis:{name}{labels}", 0.0)

    assert change("prompt_tokens_total") == 3
    assert change("generation_tokens_total") == 10
    assert change("request_success_total", '{finished_reason="length",model_name="jaxis-tiny"}') == 2
    assert change("time_to_first_token_seconds_count") == 1
    assert change("e2e_request_latency_seconds_count") == 1
    assert after[f"jaxis:e2e_request_latency_seconds_sum{label}"] > 0
    assert after[f"jaxis:num_requests_running{label}"] == 0
    assert after[f"jaxis:kv_cache_usage_perc{label}"] == 0


def test_cors_is_off_unless_allowed(serve):
    headers = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    closed, opened = serve(), None
    response = httpx.options(f"{closed.url}/v1/completions", headers=headers)
    assert "access-control-allow-origin" not in response.headers
    closed.stop()
    opened = serve(allowed_origins=("https://app.example",), api_keys=("k",))
    response = httpx.options(f"{opened.url}/v1/completions", headers=headers)
    assert response.headers["access-control-allow-origin"] == "https://app.example"
    other = httpx.options(f"{opened.url}/v1/completions", headers={**headers, "Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers


def test_a_page_whose_name_points_here_is_refused(serve):
    url = serve(only_allowed_hosts=True, allowed_hosts=("llm.example",)).url
    for host, status in {
        "localhost": 200,
        "127.0.0.1:8000": 200,
        "[::1]:8000": 200,
        "LLM.example:443": 200,
        "evil.example": 403,
        "127.0.0.1.evil.example:8000": 403,
        "": 403,
    }.items():
        response = httpx.get(f"{url}/v1/models", headers={"Host": host})
        assert response.status_code == status, host
        if status == 403:
            assert "--allowed-hosts" in response.json()["error"]["message"]


def test_a_script_of_another_page_cannot_send_text_as_json(http):
    """A browser sends text/plain without asking first; JSON it asks for, and CORS says no."""
    response = http.post("/v1/completions", content=b'{"prompt": "x"}', headers={"Content-Type": "text/plain"})
    assert response.status_code == 400


def test_json_log_lines_carry_the_request(http, caplog):
    logger = logging.getLogger("jaxis.server.access")
    with caplog.at_level(logging.INFO, logger.name):
        http.get("/version", headers={"X-Request-Id": "r-1"})
        deadline = time.monotonic() + 10  # the line comes after the answer
        while not (records := [record for record in caplog.records if record.name == logger.name]):
            assert time.monotonic() < deadline
    [record] = records
    record.request_id = "r-1"
    line = json.loads(JsonFormatter().format(record))
    assert {"method": "GET", "path": "/version", "status": 200, "request_id": "r-1"}.items() <= line.items()
