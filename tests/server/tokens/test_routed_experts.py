"""Experts in answers: the same in every route and in streams, in vLLM's form."""

import base64
import io
import json
import socket

import httpx
import numpy as np
import pytest

from jaxis.engine.arguments import EngineArgs
from jaxis.engine.client import wire
from jaxis.engine.setup import build_engine
from jaxis.host.channel import MessageReader, to_frame
from jaxis.host.progress import ProgressDisplay
from jaxis.outputs import CompletionOutput, RequestOutput
from tests.server.conftest import serving
from tests.support.tiny_checkpoints import write_checkpoint

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 5, 6, 7, 8, 9, 10, 11, 12, 3, 4]
NUM_LAYERS, NUM_CHOSEN, NUM_EXPERTS = 2, 3, 8
SIZES = {"num_experts": NUM_EXPERTS, "num_experts_per_tok": NUM_CHOSEN, "moe_intermediate_size": 32}


@pytest.fixture(scope="module")
def experts_http(tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp("experts"), "qwen3_moe", **SIZES)
    arguments = EngineArgs(str(folder), max_num_seqs=2, max_num_batched_tokens=64, kv_cache_memory="8MiB")
    built = build_engine(arguments, ProgressDisplay(False))
    with serving(built) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
    built.engine.close()


def post(client, path, **body):
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(client, path, **body):
    text = client.post(path, json={**body, "stream": True}).text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def rows(text):
    return np.load(io.BytesIO(base64.b64decode(text)))


def test_every_route_returns_them(experts_http):
    asked = {"max_tokens": 5, "temperature": 0, "ignore_eos": True, "return_routed_experts": True}
    [choice] = post(experts_http, "/inference/v1/generate", token_ids=PROMPT, sampling_params=asked)["choices"]
    experts = rows(choice["routed_experts"])
    assert experts.shape == (len(PROMPT) + 4, NUM_LAYERS, NUM_CHOSEN)
    assert experts.dtype == np.uint8
    assert experts.max() < NUM_EXPERTS
    assert len(np.unique(experts)) > NUM_CHOSEN
    [completion] = post(experts_http, "/v1/completions", prompt=PROMPT, **asked)["choices"]
    np.testing.assert_array_equal(rows(completion["routed_experts"]), experts)
    *before, last = events(experts_http, "/v1/completions", prompt=PROMPT, routed_experts_prompt_start=17, **asked)
    assert not any("routed_experts" in choice for event in before for choice in event["choices"])
    np.testing.assert_array_equal(rows(last["choices"][0]["routed_experts"]), experts[17:])
    without = post(experts_http, "/v1/completions", prompt=PROMPT, **{**asked, "return_routed_experts": False})
    assert "routed_experts" not in without["choices"][0]


def test_chat_returns_them_whole_and_streamed(experts_http):
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    whole = post(experts_http, "/v1/chat/completions", **body, return_routed_experts=True)
    experts = rows(whole["choices"][0]["routed_experts"])
    assert len(experts) == whole["usage"]["total_tokens"] - 1
    chunks = events(experts_http, "/v1/chat/completions", **body, return_routed_experts=True)
    found = [choice["routed_experts"] for chunk in chunks for choice in chunk["choices"] if "routed_experts" in choice]
    assert [len(rows(text)) for text in found] == [len(experts)]


def test_what_cannot_be_returned_is_refused_in_one_line(http, experts_http):
    body = {"prompt": "hello", "max_tokens": 2, "return_routed_experts": True}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "return_routed_experts"
    assert "the model has no experts" in answer.json()["error"]["message"]
    beyond = {"prompt": PROMPT, "return_routed_experts": True, "routed_experts_prompt_start": 19}
    answer = experts_http.post("/v1/completions", json=beyond)
    assert answer.status_code == 400
    assert "routed_experts_prompt_start" in answer.text
    answer = experts_http.post("/v1/responses", json={"input": "hello", "return_routed_experts": True})
    assert answer.status_code in (400, 422)
    assert "return_routed_experts" in answer.text


def test_they_cross_from_the_engine_process():
    experts = np.arange(24, dtype=np.uint16).reshape(4, 2, 3)
    output = RequestOutput("a", None, [1], None, [CompletionOutput(0, routed_experts=experts)], finished=True)
    near, far = socket.socketpair()
    with near, far:
        far.sendall(to_frame(wire.EngineOutputs([output])))
        [report] = MessageReader(wire.REPORTS).feed(near.recv(1 << 16))
    received = report.outputs[0].outputs[0].routed_experts
    assert received.dtype == np.uint16
    np.testing.assert_array_equal(received, experts)
