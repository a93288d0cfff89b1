"""Replicas under Ray Serve give the answers of one engine, and one that dies takes only its own streams with it."""

import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from jaxis import LLM, SamplingParams
from jaxis.errors import ConfigError
from tests.integrations.completion_stream import stream
from tests.integrations.ray_cluster import ray_cluster, wait_for_actors
from tests.support.host_processes import free_port

pytest.importorskip("ray")
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning")]

PROMPTS = ["the cat", "Paris is the capital of", "1 + 2 =", "A dog and a cat", "once upon a time", "the sea", "7", "I"]
ENGINE = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "kv_cache_memory": "8MiB"}
REPLICA = "ServeReplica:jaxis:JaxisServer"
LONG = 1500


@pytest.fixture(scope="module")
def client():
    """A client of two replicas; requests with the same x-session-id go to the same one."""
    from ray import serve

    from jaxis.integrations.ray_serve import build

    router = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
    with tempfile.TemporaryDirectory(prefix="ray") as folder, ray_cluster(folder):
        port = free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        try:
            options = {
                "num_replicas": 2,
                "ray_actor_options": {"num_cpus": 0.5},
                "request_router_config": {"request_router_class": router},
                "health_check_period_s": 1,
            }
            serve.run(build(ENGINE | options), name="jaxis")
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as http:
                yield http
        finally:
            serve.shutdown()


@pytest.fixture(scope="module")
def answers():
    """Greedy answers of one engine: (short, long)."""
    with LLM(show_progress=False, **ENGINE) as llm:
        short = llm.generate(PROMPTS, SamplingParams(max_tokens=24, temperature=0))
        long = llm.generate(PROMPTS, SamplingParams(max_tokens=LONG, temperature=0, ignore_eos=True))
    return [[output.outputs[0].text for output in outputs] for outputs in (short, long)]


def test_streams_are_those_of_one_engine(client, answers):
    with ThreadPoolExecutor(16) as pool:
        runs = [(i, pool.submit(stream, client, PROMPTS[i], f"{i}-{n}")) for i in range(8) for n in range(2)]
        for i, run in runs:
            assert run.result()[0] == answers[0][i]


def test_a_session_finds_its_prefix_again_and_other_ones_do_not(client):
    prompt = list(range(100, 164))  # four blocks, of which three can be found
    cached = {}
    for session in range(6):
        for turn in range(2):
            _, usage = stream(client, prompt, f"session-{session}", cache_salt="stick")
            cached[session, turn] = usage["prompt_tokens_details"]["cached_tokens"]
    assert [cached[session, 1] for session in range(6)] == [48] * 6
    # Of the first turns, only one on each replica had nothing to find; six sessions are on both.
    assert sorted(cached[session, 0] for session in range(6)) == [0, 0, 48, 48, 48, 48]


def test_a_client_that_leaves_ends_its_request(client):
    body = {"model": "jaxis-tiny", "prompt": "the cat", "max_tokens": LONG, "ignore_eos": True, "stream": True}
    headers = {"x-session-id": "leaves"}
    with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        next(response.iter_lines())
    deadline = time.monotonic() + 20
    while client.get("/load", headers=headers).json()["server_load"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    metrics = client.get("/metrics", headers=headers).text
    assert 'jaxis:request_success_total{finished_reason="abort",model_name="jaxis-tiny"} 1.0' in metrics


def test_a_killed_replica_fails_its_own_streams_and_comes_back(client, answers):
    first, second = wait_for_actors(REPLICA, 2)
    engines = first.children(recursive=True)
    assert {engine.environ()["NPROC"] for engine in engines} == {"1"}  # of the 0.5 CPUs that are reserved
    prompts = 2 * PROMPTS  # that hashing sends all of them to one replica is as good as impossible
    all_started = threading.Barrier(len(prompts) + 1, timeout=60)

    def run(i):
        once = iter([all_started.wait])
        return stream(client, prompts[i], f"long-{i}", LONG, lambda: next(once, int)(), ignore_eos=True)[0]

    with ThreadPoolExecutor(len(prompts)) as pool:
        runs = [pool.submit(run, i) for i in range(len(prompts))]
        all_started.wait()
        first.kill()
        outcomes = []
        for i, each in enumerate(runs):
            try:
                assert each.result() == answers[1][i % len(PROMPTS)]
                outcomes.append("answered")
            except (httpx.TransportError, ValueError) as error:
                outcomes.append(f"{type(error).__name__}: {error}")
    assert 0 < outcomes.count("answered") < len(prompts), outcomes
    # Its engine's process ends with it.
    assert psutil.wait_procs(engines, timeout=20)[1] == []
    for i, prompt in enumerate(PROMPTS):
        assert stream(client, prompt, f"after-{i}")[0] == answers[0][i]
    replicas = wait_for_actors(REPLICA, 2)
    assert second in replicas
    assert first not in replicas
    for i, prompt in enumerate(PROMPTS):
        assert stream(client, prompt, f"again-{i}")[0] == answers[0][i]


def test_a_deployment_that_is_deleted_lets_running_streams_end(client, answers):
    from ray import serve

    started = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(stream, client, PROMPTS[0], "drains", LONG, started.set, ignore_eos=True)
        assert started.wait(60)
        pool.submit(serve.delete, "jaxis").result()
        assert running.result()[0] == answers[1][0]
    assert wait_for_actors(REPLICA, 0) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"replicas": 2}, "replicas=2 is no argument of an engine"),
        ({"max_num_seqs": "many"}, "max_num_seqs='many' cannot be used: "),
        ({"kv_cache_memory": "much"}, "kv_cache_memory='much' must be a number of bytes"),
        ({"autoscaling_config": "{min"}, "autoscaling_config is not YAML"),
    ],
)
def test_arguments_that_cannot_be_honoured_are_refused_before_anything_starts(arguments, message):
    from jaxis.integrations.ray_serve import build

    with pytest.raises(ConfigError, match=message):
        build(arguments)


def test_strings_of_a_command_line_become_values():
    from jaxis.integrations.ray_arguments import ServeArguments

    given = ServeArguments.of(
        {
            "model": "org/model",
            "max_num_seqs": "8",
            "enable_prefix_caching": "false",
            "max_queued": "4",
            "served_model_names": "[a, b]",
            "num_replicas": "auto",
            "ray_actor_options": "{num_cpus: 2}",
        }
    )
    assert given.engine == {"model": "org/model", "max_num_seqs": 8, "enable_prefix_caching": False, "fit_memory": True}
    assert (given.config.served_model_names, given.config.max_queued) == (("a", "b"), 4)
    assert given.deployment["num_replicas"] == "auto"
    assert given.deployment["ray_actor_options"] == {"num_cpus": 2}
    assert given.deployment["max_ongoing_requests"] == 12
