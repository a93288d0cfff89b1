"""Both servers behind llm-d's routing sidecar: the requests that it sends, field by field.

They follow `runNIXLProtocolV2` of pkg/sidecar/proxy/connector_nixlv2.go in llm-d/llm-d-inference-scheduler at commit
520af478: the prefill's limits become 1 under every name that the API has, `stream_options` goes, and the decode gets
what the client sent, with the prefill's `kv_transfer_params`.
"""

from __future__ import annotations

import contextlib
import json
import uuid

import httpx
import pytest

from jaxis.engine.arguments import EngineArgs
from jaxis.engine.setup import build_engine
from jaxis.host.progress import ProgressDisplay
from tests.server.conftest import serving

GREEDY = {"temperature": 0, "max_tokens": 12, "logprobs": True, "top_logprobs": 3}
MESSAGES = [{"role": "user", "content": "Tell me about the sea, and about ships. " * 8}]
TEXT = {"prompt": MESSAGES[0]["content"], "temperature": 0, "max_tokens": 12, "logprobs": 3}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES = "/v1/responses"
LIMITS = {RESPONSES: ["max_output_tokens"]}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


def said(answer):
    """The parts that must be bit-identical."""
    choices = [{**choice, "message": choice.get("message")} for choice in answer["choices"]]
    return choices, answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]


def cached(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@contextlib.contextmanager
def server_in_a_thread(**transfer):
    arguments = EngineArgs(
        max_num_seqs=4, max_num_batched_tokens=64, kv_cache_memory="8MiB", kv_transfer_config={"kv_port": 0, **transfer}
    )
    built = build_engine(arguments, ProgressDisplay(False))
    try:
        with serving(built) as running, httpx.Client(base_url=running.url, timeout=60) as client:
            yield client
    finally:
        built.engine.close()


@pytest.fixture(scope="module")
def servers():
    with server_in_a_thread(kv_role="kv_producer") as one, server_in_a_thread(kv_role="kv_consumer") as two:
        yield one, two


def through_sidecar(servers, path, body):
    """The decoding server's answer to a client's request, and what the prefill server answered."""
    one, two = servers
    headers = {"x-request-id": str(uuid.uuid1())}
    names = LIMITS.get(path, ["max_tokens", "max_completion_tokens"])
    nothing = dict.fromkeys(["remote_engine_id", "remote_block_ids", "remote_host", "remote_port"])
    request = {name: value for name, value in body.items() if name != "stream_options"}
    request |= {"stream": False, **dict.fromkeys(names, 1)}
    request["kv_transfer_params"] = {"do_remote_decode": True, "do_remote_prefill": False, **nothing}
    prefilled = one.post(path, json=request, headers=headers)
    assert prefilled.status_code == 200, prefilled.text
    params = prefilled.json()["kv_transfer_params"]
    answer = two.post(path, json={**body, "kv_transfer_params": params}, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer, prefilled.json()


def events(answer):
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": MESSAGES, **GREEDY}),
        (CHAT, {"messages": MESSAGES, "temperature": 0, "max_completion_tokens": 12, "min_tokens": 12}),
        (COMPLETIONS, TEXT),
        (COMPLETIONS, {**TEXT, "min_tokens": 5}),
    ],
)
def test_an_answer_is_that_of_one_server_and_its_prompt_is_not_computed_twice(servers, path, body):
    body = {**body, "cache_salt": uuid.uuid4().hex}
    answer, prefilled = through_sidecar(servers, path, body)
    assert prefilled["usage"]["completion_tokens"] == 1
    expected = servers[1].post(path, json={**body, "cache_salt": uuid.uuid4().hex}).json()
    assert said(answer.json()) == said(expected)
    assert cached(answer.json()) == (answer.json()["usage"]["prompt_tokens"] - 1) // 16 * 16 > 48


def test_a_client_may_stream(servers):
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 12, "cache_salt": "stream"}
    answer, _ = through_sidecar(servers, CHAT, {**body, **STREAMED})
    *parts, last = events(answer)
    expected = servers[1].post(CHAT, json={**body, "cache_salt": "alone"}).json()
    text = "".join(part["choices"][0]["delta"].get("content", "") for part in parts)
    assert text == expected["choices"][0]["message"]["content"]
    assert cached(last) > 48


def test_responses_are_handed_over(servers):
    body = {"input": MESSAGES[0]["content"], "temperature": 0, "max_output_tokens": 12, "cache_salt": "responses"}
    answer, _ = through_sidecar(servers, RESPONSES, body)
    expected = servers[1].post(RESPONSES, json={**body, "cache_salt": "alone"}).json()
    texts = [response["output"][-1]["content"][0]["text"] for response in (answer.json(), expected)]
    assert texts[0] == texts[1]
    assert answer.json()["usage"]["input_tokens_details"]["cached_tokens"] > 48
    assert "kv_transfer_params" not in answer.json()


def test_a_decode_in_pieces_goes_on_where_it_was(servers):
    """`runChunkedDecode`: later pieces have no parameters, and continue the last message."""
    body = {"messages": MESSAGES, "temperature": 0, "ignore_eos": True, "cache_salt": "pieces"}
    first, _ = through_sidecar(servers, CHAT, {**body, "max_tokens": 4, "max_completion_tokens": 4})
    text = first.json()["choices"][0]["message"]["content"]
    messages = [*MESSAGES, {"role": "assistant", "content": text}]
    more = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    second = servers[1].post(CHAT, json={**body, **more, "max_tokens": 4, "max_completion_tokens": 4})
    assert second.status_code == 200, second.text
    assert cached(second.json()) > 48


@pytest.mark.parametrize(
    ("path", "body"),
    [(CHAT, {"messages": MESSAGES, "n": 2}), (COMPLETIONS, {"prompt": [TEXT["prompt"], "The sea. " * 30]})],
)
def test_the_last_event_of_each_prompt_has_the_parameters(servers, path, body):
    keep = {"kv_transfer_params": {"do_remote_decode": True}}
    streamed = events(servers[0].post(path, json={**body, **keep, **STREAMED, "max_tokens": 3}))
    with_params = [event for event in streamed if "kv_transfer_params" in event]
    assert len(with_params) == (1 if path == CHAT else 2)
    for event in with_params:
        assert event["choices"][-1]["finish_reason"] is not None
        assert event["kv_transfer_params"].keys() >= {"do_remote_prefill", "remote_host", "remote_port"}
    whole = servers[0].post(path, json={**body, **keep, "max_tokens": 3}).json()
    assert whole["kv_transfer_params"] == with_params[-1]["kv_transfer_params"]


def test_two_limits_that_differ_are_refused(servers):
    refused = servers[0].post(COMPLETIONS, json={**TEXT, "max_completion_tokens": 1})
    assert refused.status_code == 400
    assert "max_tokens and max_completion_tokens are the same limit and differ" in refused.text


def test_streams_and_lists_of_prompts_take_what_was_handed_over(servers):
    batch = {**TEXT, "prompt": ["The sea. " * 30, "The land. " * 30]}
    answer, prefilled = through_sidecar(servers, COMPLETIONS, batch)
    assert "kv_transfer_params" not in answer.json()
    assert cached(answer.json()) > 2 * 48
    more = {"stream": True, "kv_transfer_params": prefilled["kv_transfer_params"]}
    streamed = events(servers[1].post(COMPLETIONS, json={**batch, **more}))
    choices = [choice for event in streamed for choice in event["choices"]]
    for choice in answer.json()["choices"]:
        assert "".join(c["text"] for c in choices if c["index"] == choice["index"]) == choice["text"]


@pytest.mark.parametrize("broken", ["yes", [1], {"remote_port": "x"}, {"do_remote_prefill": 1}])
def test_parameters_that_are_none_are_refused_by_name(servers, broken):
    refused = servers[1].post(COMPLETIONS, json={**TEXT, "kv_transfer_params": broken})
    assert refused.status_code == 400
    assert "kv_transfer_params" in refused.text
