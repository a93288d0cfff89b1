"""Several models in processes of their own: one that is killed, thousand loads, and what they leave behind."""

import json
import os
import signal
import subprocess

import httpx
import psutil
import pytest

from tests.server.several.model_pools import FakeModel, serving_pool
from tests.support.cli_model import JAXIS
from tests.support.waiting import wait_until

MODELS = """
defaults: {max_num_seqs: 4, max_model_len: 2048, kv_cache_memory: 8MiB, max_num_batched_tokens: 64}
models: [{name: a}, {name: b}]
"""
LONG = {"prompt": "Once", "max_tokens": 1900, "ignore_eos": True, "stream": True}


@pytest.fixture
def server(tmp_path):
    """`jaxis serve` of two models: its process, and a client."""
    (tmp_path / "models.yaml").write_text(MODELS)
    command = [*JAXIS, "serve", "--port", "0", "--models", str(tmp_path / "models.yaml")]
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state"), "JAX_PLATFORMS": "cpu"}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, stderr=log, env=environment)
    wait_until(lambda: "curl" in (tmp_path / "log").read_text())
    [url] = [line.split()[1] for line in (tmp_path / "log").read_text().splitlines() if line.startswith("url:")]
    with httpx.Client(base_url=url.removesuffix("/v1"), timeout=120) as http:
        yield psutil.Process(process.pid), http
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


def engines(process):
    """The engine processes of a server."""
    return [child for child in process.children() if "worker_main" in " ".join(child.cmdline())]


def ask(http, model, **more):
    return http.post("/v1/completions", json={"model": model, "prompt": "Paris", "max_tokens": 4, **more})


def test_an_engine_that_is_killed_ends_only_its_own_models_requests(server):
    process, http = server
    first = ask(http, "a", temperature=0).json()["choices"]
    [of_a] = engines(process)
    assert ask(http, "b", temperature=0).json()["choices"] == first
    with (
        http.stream("POST", "/v1/completions", json={"model": "a", **LONG}) as of_lost,
        http.stream("POST", "/v1/completions", json={"model": "b", **LONG}) as of_other,
    ):
        lost, other = of_lost.iter_lines(), of_other.iter_lines()
        assert next(lost).startswith("data: {")
        assert next(other).startswith("data: {")
        os.kill(of_a.pid, signal.SIGKILL)
        rest = [line for line in lost if line]
        assert "signal 9" in json.loads(rest[-2][6:])["error"]["message"]
        assert http.get("/health").status_code == 200
        assert ask(http, "a").status_code == 503
        events = [json.loads(line[6:]) for line in other if line.startswith("data: {")]
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    wait_until(lambda: ask(http, "a").status_code == 200)
    assert ask(http, "a", temperature=0).json()["choices"] == first
    assert len(engines(process)) == 2


def test_a_thousand_loads_and_unloads_leave_nothing_behind():
    process = psutil.Process()
    with serving_pool(FakeModel("a"), FakeModel("b"), most_loaded=1) as client:
        figures = []
        for number in range(1000):
            assert client.ask("ab"[number % 2]).status_code == 200
            if number % 100 == 99:
                figures.append((process.memory_info().rss, process.num_threads(), process.num_fds()))
        assert client.models["a"].num_loads == client.models["b"].num_loads == 500
    print(f"\nmemory, threads and files after 200 loads {figures[1]}, after 1000 {figures[-1]}")
    assert figures[-1][0] < figures[1][0] + (8 << 20)
    assert figures[-1][1] <= figures[1][1] + 1
    assert figures[-1][2] <= figures[1][2] + 2
