"""Two servers, one of which computes prompts for the other, behind a proxy that does what vLLM's and llm-d's do."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time

import httpx

from jaxis.engine.arguments import EngineArgs
from jaxis.engine.setup import build_engine
from jaxis.host.progress import ProgressDisplay
from tests.engine.hosts.commands import SERVE
from tests.server.conftest import serving
from tests.support.host_processes import free_port, host_processes
from tests.support.waiting import wait_until

GREEDY = {"temperature": 0, "max_tokens": 12, "logprobs": True, "top_logprobs": 3}
MESSAGES = [{"role": "user", "content": "Tell me about the sea, and about ships. " * 8}]
TEXT = {"prompt": MESSAGES[0]["content"], "temperature": 0, "max_tokens": 12, "logprobs": 3}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


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
    """What must be bit-identical."""
    choices = [{**choice, "message": choice.get("message")} for choice in answer["choices"]]
    return choices, answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]


def cached(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def counted(client, name):
    """The peer tier's counter; up to half a second later than what it counts."""
    [value] = re.findall(rf'^jaxis:kv_offload_{name}_total{{.*tier="peer"}} (\S+)$', client.get("/metrics").text, re.M)
    return float(value)


def is_refused(params):
    """Whether nobody listens any more: the process of a killed server's engine ends a moment later."""
    try:
        socket.create_connection((params["remote_host"], params["remote_port"]), 1).close()
    except OSError:
        return True
    return False


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


def test_both_endpoints_hand_a_prompt_over_and_streams_and_lists_of_prompts_take_it():
    with server_in_a_thread(kv_role="kv_producer") as one, server_in_a_thread(kv_role="kv_consumer") as two:
        for path, request in ((CHAT, {"messages": MESSAGES, **GREEDY}), (COMPLETIONS, TEXT)):
            expected = two.post(path, json={**request, "cache_salt": path}).json()
            answer = decode(two, path, request, prefill(one, path, request))
            assert said(answer) == said(expected)
            assert cached(answer) == (answer["usage"]["prompt_tokens"] - 1) // 16 * 16 > 48

        batch = {**TEXT, "prompt": ["The sea. " * 30, "The land. " * 30]}
        answer = decode(two, COMPLETIONS, batch, params := prefill(one, COMPLETIONS, batch))
        assert cached(answer) > 2 * 48
        streamed = two.post(COMPLETIONS, json={**batch, "stream": True, "kv_transfer_params": params}).text
        events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
        choices = [choice for event in events for choice in event["choices"]]
        for choice in answer["choices"]:
            assert "".join(c["text"] for c in choices if c["index"] == choice["index"]) == choice["text"]

        for broken in ("yes", [1], {"remote_port": "x"}, {"do_remote_prefill": 1}):
            refused = two.post(COMPLETIONS, json={**TEXT, "kv_transfer_params": broken})
            assert refused.status_code == 400
            assert "kv_transfer_params" in refused.text


def test_a_decode_server_answers_as_one_server_alone_whatever_becomes_of_the_prefill_server():
    body = {"messages": MESSAGES, **GREEDY}
    with servers(
        transfer("kv_producer", free_port()),
        transfer("kv_consumer", free_port()),
        (),
    ) as [(first, one), (_, two), (_, alone)]:
        refused = alone.post(CHAT, json={**body, "kv_transfer_params": {"do_remote_decode": True}})
        assert refused.status_code == 400
        assert "kv_transfer_config" in refused.text

        for path, request in ((CHAT, body), (COMPLETIONS, TEXT)):
            expected = alone.post(path, json=request).json()
            assert cached(expected) == 0
            params = prefill(one, path, request)
            assert params.keys() >= {"do_remote_prefill", "remote_engine_id", "remote_host", "remote_port"}
            answer = decode(two, path, request, params)
            assert said(answer) == said(expected)
            num_prompt = answer["usage"]["prompt_tokens"]
            assert cached(answer) == (num_prompt - 1) // 16 * 16 > 48, "the prompt was computed again"
        wait_until(lambda: counted(two, "loaded_blocks") == counted(one, "saved_blocks") > 6)
        assert counted(two, "failed_blocks") == counted(two, "missed_blocks") == 0

        other = {**body, "messages": [{"role": "user", "content": "Ships again? " * 20}]}
        expected = alone.post(CHAT, json=other).json()
        params = prefill(one, CHAT, other)
        first.process.kill()
        first.process.wait()
        wait_until(lambda: is_refused(params))
        for more in ({}, {"cache_salt": "another"}):  # which finds nothing of the first answer
            answer = decode(two, CHAT, {**other, **more}, params)
            assert said(answer) == said(expected)
            assert cached(answer) == 0
        wait_until(lambda: counted(two, "failed_blocks") >= 2)
