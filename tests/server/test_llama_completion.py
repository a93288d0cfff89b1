"""llama-server's /completion: /v1/completions in its shape, whole and streamed alike."""

import json

import httpx
import pytest

from tests.support.scripted_engine import ScriptedEngine, served

GREETING = "def hello():"


@pytest.fixture(scope="module")
def running():
    engine = ScriptedEngine()
    with served(engine) as url:
        yield engine, url


@pytest.fixture
def engine(running):
    engine, _ = running
    engine.text, engine.finish_reason, engine.stop_reason = " return 1", "stop", None
    engine.prompt = engine.params = engine.grammar = None
    return engine


@pytest.fixture
def http(running):
    with httpx.Client(base_url=running[1]) as http:
        yield http


def both(http, **body):
    """The whole answer, seen to be what the stream's events add up to."""
    whole = http.post("/completion", json=body).json()
    text = http.post("/completion", json={**body, "stream": True}).text
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line]
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1]["content"] == ""
    assert "".join(event["content"] for event in events) == whole["content"]
    assert all("timings" not in event for event in events[:-1])
    for name in ("stop_type", "stopping_word", "tokens_predicted", "tokens_evaluated", "truncated", "model"):
        assert events[-1][name] == whole[name]
    return whole


def test_the_prompt_goes_on(http, engine):
    answer = both(http, prompt=GREETING)
    assert (answer["content"], answer["stop_type"], answer["stopping_word"]) == (" return 1", "eos", "")
    assert (answer["tokens_evaluated"], answer["tokens_predicted"]) == (len(GREETING), len(engine.text))
    assert answer["timings"]["prompt_n"] + answer["timings"]["cache_n"] == len(GREETING)
    assert engine.prompt == GREETING
    assert engine.params.max_tokens > 10**6
    assert http.post("/completions", json={"prompt": [1, 2]}).json()["tokens_evaluated"] == 2


def test_why_it_ended(http, engine):
    engine.finish_reason = "length"
    assert both(http, prompt="x", n_predict=3)["stop_type"] == "limit"
    assert engine.params.max_tokens == 3
    engine.finish_reason, engine.stop_reason = "stop", "END"
    answer = both(http, prompt="x", stop=["END"])
    assert (answer["stop_type"], answer["stopping_word"]) == ("word", "END")


def test_parameters_arrive(http, engine):
    sampling = {"temperature": 0.5, "top_k": -1, "top_p": 0.9, "min_p": 0.1, "seed": -1, "repeat_penalty": 1.1}
    neutral = {"typical_p": 1.0, "mirostat": 0, "samplers": [], "cache_prompt": True, "n_probs": 0, "id_slot": -1}
    response = http.post("/completion", json={"prompt": "x", **sampling, **neutral})
    assert response.status_code == 200
    assert "x-jaxis-ignored" not in response.headers
    params = engine.params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.5, 0, 0.9, 0.1)
    assert (params.seed, params.repetition_penalty) == (None, 1.1)
    schema = {"type": "object", "properties": {}}
    both(http, prompt="x", json_schema=schema)
    assert engine.params.structured_outputs.json_schema == schema
    both(http, prompt="x", grammar='root ::= "a"', json_schema=None)
    assert engine.grammar is not None


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"n_predict": 0}, "n_predict"),
        ({"prompt": []}, "prompt"),
        ({"typical_p": 0.5}, "typical_p"),
        ({"n_probs": 5}, "n_probs"),
        ({"logit_bias": [[1, 2.0]]}, "logit_bias"),
        ({"grammar": 'root ::= "a"', "json_schema": {}}, "json_schema"),
        ({"grammar": "root ::= ("}, "grammar"),
        ({"json_schema": {"type": "no such type"}}, "json_schema"),
        ({"model": "other"}, "model"),
    ],
)
def test_what_cannot_be_honoured_is_refused(http, more, param):
    response = http.post("/completion", json={"prompt": "x", **more})
    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"] == param
