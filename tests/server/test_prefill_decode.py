"""Two servers, one of which computes prompts for the other, behind a proxy that does what vLLM's and llm-d's do."""

from __future__ import annotations

import contextlib
import json
import re
import time

import httpx
import pytest

from tests.engine.hosts.commands import SERVE
from tests.support.host_processes import free_port, host_processes

GREEDY = {"temperature": 0, "max_tokens": 12, "logprobs": True, "top_logprobs": 3}
MESSAGES = [{"role": "user", "content": "Tell me about the sea, and about ships. " * 8}]


def serve(port, *options):
    return [*SERVE, "--port", str(port), "--max-num-seqs", "4", "--kv-cache-memory", "32MiB", *options]


def transfer(role, port):
    return "--kv-transfer-config", json.dumps({"kv_role": role, "kv_port": port})


@contextlib.contextmanager
def servers(*commands):
    """Servers with these options, as (process, client), once they answer."""
    ports = [free_port() for _ in commands]
    with host_processes([serve(port, *options) for port, options in zip(ports, commands, strict=True)]) as hosts:
        clients = [httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) for port in ports]
        for host, client in zip(hosts, clients, strict=True):
            deadline = time.monotonic() + 120
            while True:
                assert host.process.poll() is None, host.output
                assert time.monotonic() < deadline, host.output
                with contextlib.suppress(httpx.TransportError):
                    if client.get("/health").status_code == 200:
                        break
                time.sleep(0.1)
        yield list(zip(hosts, clients, strict=True))


def prefill(client, path, body):
    """The proxy's first request: its answer's `kv_transfer_params`."""
    unknown = dict.fromkeys(["remote_engine_id", "remote_block_ids", "remote_host", "remote_port"])
    params = {"do_remote_decode": True, "do_remote_prefill": False, **unknown}
    answer = client.post(path, json={**body, "max_tokens": 1, "stream": False, "kv_transfer_params": params})
    assert answer.status_code == 200, answer.text
    return answer.json()["kv_transfer_params"]


def decode(client, path, body, params):
    answer = client.post(path, json={**body, "kv_transfer_params": params})
    assert answer.status_code == 200, answer.text
    assert "kv_transfer_params" not in answer.json()
    return answer.json()


def said(answer):
    """What must be the same, to the bit."""
    choices = [{**choice, "message": choice.get("message")} for choice in answer["choices"]]
    return choices, answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]


def cached(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def counted(client, name):
    """The peer tier's counter; half a second later than what it counts."""
    time.sleep(1.2)
    [value] = re.findall(rf'^jaxis:kv_offload_{name}_total{{.*tier="peer"}} (\S+)$', client.get("/metrics").text, re.M)
    return float(value)


@pytest.mark.slow
def test_a_decode_server_answers_as_one_server_alone_whatever_becomes_of_the_prefill_server():
    chat, completions = "/v1/chat/completions", "/v1/completions"
    body = {"messages": MESSAGES, **GREEDY}
    text = {"prompt": MESSAGES[0]["content"], "temperature": 0, "max_tokens": 12, "logprobs": 3}
    with servers(
        transfer("kv_producer", free_port()),
        transfer("kv_consumer", free_port()),
        (),
    ) as [(first, one), (_, two), (_, alone)]:
        refused = alone.post(chat, json={**body, "kv_transfer_params": {"do_remote_decode": True}})
        assert refused.status_code == 400
        assert "kv_transfer_config" in refused.text

        for path, request in ((chat, body), (completions, text)):
            expected = alone.post(path, json=request).json()
            assert cached(expected) == 0
            params = prefill(one, path, request)
            assert params.keys() >= {"do_remote_prefill", "remote_engine_id", "remote_host", "remote_port"}
            answer = decode(two, path, request, params)
            assert said(answer) == said(expected)
            num_prompt = answer["usage"]["prompt_tokens"]
            assert cached(answer) == (num_prompt - 1) // 16 * 16 > 48, "the prompt was computed again"
        assert counted(two, "loaded_blocks") == counted(one, "saved_blocks") > 6
        assert counted(two, "failed_blocks") == counted(two, "missed_blocks") == 0

        other = {**body, "messages": [{"role": "user", "content": "Ships again? " * 20}]}
        expected = alone.post(chat, json=other).json()
        params = prefill(one, chat, other)
        first.process.kill()
        first.process.wait()
        for _ in range(2):
            two.post("/reset_prefix_cache")
            answer = decode(two, chat, other, params)
            assert said(answer) == said(expected)
            assert cached(answer) == 0
        assert counted(two, "failed_blocks") >= 2
