"""Attacks on a whole server: small requests beside them are answered, and its memory comes back."""

import json
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from tests.support.cli_model import JAXIS
from tests.support.waiting import wait_until

NUM_ATTACKERS = 8
SMALL_SECONDS = 2.0
GROWTH_BYTES = 300_000_000
TEXT = "a b " * 1_700_000
SMALL = {
    "/v1/completions": {"prompt": "Once", "max_tokens": 2},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 8,
        "structured_outputs": {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    },
    "/tokenize": {"prompt": "Hi"},
}


@pytest.fixture(scope="module")
def server():
    """(address, process)"""
    command = [*JAXIS, "serve", "--port", "0", "--kv-cache-memory", "16MiB", "--max-num-seqs", "4"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    url = next(line.split()[1] for line in process.stderr if line.startswith("url:")).removesuffix("/v1")
    threading.Thread(target=lambda: list(process.stderr), daemon=True).start()
    for _ in range(3):
        for path, body in SMALL.items():
            assert httpx.post(url + path, json=body, timeout=60).status_code == 200
    yield url, psutil.Process(process.pid)
    process.terminate()
    assert process.wait(60) == 0


def large_schema(number):
    properties = {f"field_{number}_{i:05}": {"type": "integer"} for i in range(3500)}
    return {"structured_outputs": {"json": {"type": "object", "properties": properties}}}


ATTACKS = {
    "prompts that cannot fit": lambda number: ("/v1/completions", {"prompt": f"{number} {TEXT}"}),
    "tokenizing": lambda number: ("/tokenize", {"prompt": f"{number} {TEXT}"}),
    "schemas": lambda number: (
        "/v1/completions",
        {"prompt": "Once", "max_tokens": 2, **large_schema(number)},
    ),
    "token ids": lambda number: ("/v1/completions", {"prompt": [number] * 2_500_000}),
}


@pytest.mark.parametrize("kind", ATTACKS)
def test_small_requests_beside_an_attack(server, kind):
    url, process = server
    before = process.memory_info().rss
    bodies = [ATTACKS[kind](number) for number in range(NUM_ATTACKERS if kind != "schemas" else 12)]
    slowest, peak = dict.fromkeys(SMALL, 0.0), before
    start = time.monotonic()
    with ThreadPoolExecutor(len(bodies)) as pool:
        attacks = [pool.submit(httpx.post, url + path, json=body, timeout=600) for path, body in bodies]
        del bodies
        while not all(attack.done() for attack in attacks):
            for path, body in SMALL.items():
                response = httpx.post(url + path, json=body, timeout=60)
                assert response.status_code == 200, response.text
                slowest[path] = max(slowest[path], response.elapsed.total_seconds())
                peak = max(peak, process.memory_info().rss)
        statuses = sorted(attack.result().status_code for attack in attacks)
    seconds = time.monotonic() - start
    wait_until(lambda: process.memory_info().rss - before < GROWTH_BYTES)
    after = process.memory_info().rss
    shown = {path: round(seconds, 3) for path, seconds in slowest.items()}
    sizes = ", ".join(f"{size / 1e6:.0f}" for size in (before, peak, after))
    print(f"{kind}: {seconds:.1f} s, {statuses}; slowest {json.dumps(shown)}; memory before, peak, after: {sizes} MB")
    assert max(slowest.values()) < SMALL_SECONDS
