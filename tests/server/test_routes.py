"""The routes beside the completions, CORS, metrics and logs."""

import json
import logging
import math
import time
from datetime import datetime

import httpx
import pytest

from jaxis.engine.opened_model import EMBEDDED_MODEL
from jaxis.host.logs import JsonFormatter
from jaxis.loading.open_checkpoint import read_tensor_infos
from jaxis.tokenizer.chat_template import render_chat_template
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
            assert answer["model"] == name


def test_models_say_what_clients_ask_for(server, http):
    """Keys of OpenAI's, Anthropic's, OpenRouter's, vLLM's and llama.cpp's clients."""
    listed = http.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    [card] = listed["data"]
    length = server.engine.info.max_model_len
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, card["id"], card["id"])
    assert {card[key] for key in ("max_model_len", "context_length", "max_input_tokens", "max_tokens")} == {length}
    assert (card["object"], card["type"], card["display_name"]) == ("model", "model", card["id"])
    assert datetime.fromisoformat(card["created_at"]).timestamp() == pytest.approx(card["created"], abs=1)
    assert "completion" in card["capabilities"]
    config = json.loads((EMBEDDED_MODEL / "config.json").read_text())
    assert card["meta"] == {
        "n_ctx": length,
        "n_ctx_train": config["max_position_embeddings"],
        "n_params": sum(math.prod(info.shape) for info in read_tensor_infos(EMBEDDED_MODEL).values()),
        "n_vocab": config["vocab_size"],
        "size": sum(file.stat().st_size for file in EMBEDDED_MODEL.rglob("*") if file.is_file()),
    }


def test_any_name_that_matches_an_alias_is_taken(serve):
    server = serve(served_model_names=("one",), model_aliases=("gpt-*", "claude-[a-z]*"))
    bodies = {
        "completions": {"prompt": "x", "max_tokens": 1},
        "chat/completions": {"messages": MESSAGES, "max_tokens": 1},
        "responses": {"input": "x", "max_output_tokens": 1},
        "messages": {"messages": MESSAGES, "max_tokens": 1},
    }
    with httpx.Client(base_url=server.url) as http:
        for name in ("gpt-5", "claude-sonnet", "one:latest"):
            assert http.get(f"/v1/models/{name}").json()["id"] == name
            for path, body in bodies.items():
                assert http.post(f"/v1/{path}", json={"model": name, **body}).json()["model"] == name
        for name in ("GPT-5", "my-gpt-5", "claude-5"):
            assert http.get(f"/v1/models/{name}").status_code == 404
        assert http.post("/v1/completions", json={"model": "", **bodies["completions"]}).json()["model"] == "one"


def test_llama_servers_routes(built_engine, http):
    tokenizer = built_engine.engine.tokenizer
    properties = http.get("/props").json()
    assert properties["default_generation_settings"]["n_ctx"] == built_engine.engine.max_model_len
    assert (properties["total_slots"], properties["model_path"]) == (8, EMBEDDED_MODEL.name)
    assert str(EMBEDDED_MODEL.parent) not in json.dumps(properties)
    assert properties["chat_template"] == tokenizer.default_chat_template
    rendered = http.post("/apply-template", json={"messages": MESSAGES}).json()
    assert rendered == {"prompt": tokenizer.apply_chat_template(MESSAGES)}
    text = "Zürich 🙂"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert http.post("/tokenize", json={"content": text}).json()["tokens"] == ids
    tokens = http.post("/tokenize", json={"content": text, "add_special": True}).json()["tokens"]
    assert tokens == tokenizer.encode(text)
    pieces = http.post("/tokenize", json={"content": text, "with_pieces": True}).json()["tokens"]
    assert [piece["id"] for piece in pieces] == ids
    data = [piece["piece"].encode() if isinstance(piece["piece"], str) else bytes(piece["piece"]) for piece in pieces]
    assert b"".join(data).decode() == text


def test_tokenizer_info_is_enough_to_render_and_count(built_engine, http):
    """lm-eval's remote tokenizer does this: renders with the template, counts with /tokenize."""
    info = http.get("/tokenizer_info").json()
    tokens = {name: info[name] for name in ("bos_token", "eos_token")}
    text = render_chat_template(info["chat_template"], MESSAGES, add_generation_prompt=True, **tokens)
    body = {"prompt": text, "add_special_tokens": False}
    assert http.post("/tokenize", json=body).json()["tokens"] == built_engine.engine.tokenizer.encode_chat(MESSAGES)
    assert info["model_max_length"] == built_engine.engine.max_model_len


def test_tokenizer_info_can_be_left_out(serve):
    assert httpx.get(f"{serve(tokenizer_info=False).url}/tokenizer_info").status_code == 404


def test_ping_and_load(serve):
    server = serve(api_keys=("k",))
    with httpx.Client(base_url=server.url) as http:
        assert (http.get("/ping").status_code, http.post("/ping").status_code) == (200, 200)
        assert http.get("/load").status_code == 401
        http.headers["Authorization"] = "Bearer k"
        assert http.get("/version").json() == {"version": __version__}
        assert http.get("/load").json() == {"server_load": 0}
        with server.engine.reserve(3):
            assert http.get("/load").json() == {"server_load": 3}


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


def test_metrics_under_vllms_names_have_its_buckets(serve):
    server = serve(metrics_prefix="vllm")
    info = server.engine.info
    with httpx.Client(base_url=server.url) as http:
        metrics = metrics_of(http)
    assert not any(name.startswith("jaxis:") for name in metrics)
    num_blocks = info.num_cache_tokens // info.block_size
    labels = f'block_size="{info.block_size}",model_name="jaxis-tiny",num_gpu_blocks="{num_blocks}"'
    assert metrics[f"vllm:cache_config_info{{{labels}}}"] == 1

    def buckets(name):
        prefix = f'vllm:{name}_bucket{{le="'
        return [float(line.removeprefix(prefix).partition('"')[0]) for line in metrics if line.startswith(prefix)]

    inf = float("inf")
    assert buckets("time_to_first_token_seconds")[-4:] == [160, 640, 2560, inf]
    assert buckets("inter_token_latency_seconds")[:3] == [0.01, 0.025, 0.05]
    assert buckets("request_time_per_output_token_seconds") == buckets("inter_token_latency_seconds")
    for name in ("e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time"):
        assert buckets(f"{name}_seconds")[:3] + buckets(f"{name}_seconds")[-2:] == [0.3, 0.5, 0.8, 7680, inf]
    tokens = buckets("request_prompt_tokens")
    assert tokens[:5] == [1, 2, 5, 10, 20]
    assert info.max_model_len / 2.5 < tokens[-2] <= info.max_model_len
    assert buckets("request_params_n") == [1, 2, 5, 10, 20, inf]


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
