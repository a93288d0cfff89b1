"""A replica of two hosts under Ray Serve gives the answers of one device, and comes back when a host is lost."""

import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from jaxis import LLM, SamplingParams
from jaxis.errors import ConfigError
from tests.integrations.completion_stream import stream
from tests.integrations.ray_cluster import actor_processes, ray_nodes, wait_for_actors
from tests.support.host_processes import free_port

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"),  # of a node that is started after the engine
]

PROMPTS = ["the cat", "Paris is the capital of", "1 + 2 =", "A dog and a cat"]
ENGINE = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "kv_cache_memory": "8MiB"}
HOSTS = {"nnodes": 2, "tensor_parallel_size": 2, "distributed_timeout_seconds": 60}
REPLICA, FOLLOWER = "ServeReplica:jaxis:JaxisServer", "JaxisFollower"
LONG = 1000


@pytest.fixture(scope="module")
def cluster():
    """Two nodes, which are processes of this machine."""
    with tempfile.TemporaryDirectory(prefix="ray") as folder, ray_nodes(folder, 2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(cluster):
    """A client of one replica, on both nodes."""
    from ray import serve

    from jaxis.integrations.ray_serve import build

    del cluster
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        options = {"ray_actor_options": {"num_cpus": 0.5}, "health_check_period_s": 1}
        serve.run(build(ENGINE | HOSTS | options), name="jaxis")
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as http:
            yield http
    finally:
        serve.shutdown()


@pytest.fixture(scope="module")
def answers():
    """Greedy answers of one device."""
    with LLM(show_progress=False, **ENGINE) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=24, temperature=0))
    return [output.outputs[0].text for output in outputs]


def streams(client):
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return [text for text, _ in pool.map(lambda prompt: stream(client, prompt, prompt), PROMPTS)]


def test_streams_are_those_of_one_device(client, answers):
    assert len(actor_processes(FOLLOWER)) == 1
    assert streams(client) == answers


def test_a_replica_that_loses_a_host_fails_its_streams_and_comes_back(client, answers):
    (replica,), (follower,) = wait_for_actors(REPLICA, 1), wait_for_actors(FOLLOWER, 1)
    engines = replica.children(recursive=True)
    started = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(stream, client, PROMPTS[0], "lost", LONG, started.set, ignore_eos=True)
        assert started.wait(60)
        follower.kill()
        with pytest.raises((httpx.TransportError, ValueError), match="host 1") as raised:
            running.result()
    assert isinstance(raised.value, ValueError)
    # Ray ends all of the replica, and starts another one on both hosts.
    assert psutil.wait_procs([replica, *engines], timeout=60)[1] == []
    new_replica, new_follower = wait_for_actors(REPLICA, 1), wait_for_actors(FOLLOWER, 1)
    assert (new_replica, new_follower) != ([replica], [follower])
    assert streams(client) == answers


def test_a_replica_that_loses_a_node_comes_back_on_another_one(client, cluster, answers):
    (replica,) = wait_for_actors(REPLICA, 1)
    _, second = cluster.list_all_nodes()
    cluster.remove_node(second)
    assert psutil.wait_procs([replica], timeout=60)[1] == []
    cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
    wait_for_actors(FOLLOWER, 1)
    assert streams(client) == answers


def test_a_deployment_that_is_deleted_ends_all_hosts(client):
    from ray import serve

    del client
    serve.delete("jaxis")
    assert wait_for_actors(REPLICA, 0) == []
    assert wait_for_actors(FOLLOWER, 0) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nnodes": 2}, "cannot be shared by nnodes=2"),
        (HOSTS | {"master_port": 1234}, "master_port=1234 is not known before Ray has placed the hosts"),
        (HOSTS | {"placement_group_bundles": [{"CPU": 1}]}, "has 1 bundles: nnodes=2 needs one a host"),
    ],
)
def test_hosts_that_cannot_be_had_are_refused_before_anything_starts(arguments, message):
    from jaxis.integrations.ray_serve import build

    with pytest.raises(ConfigError, match=message):
        build(arguments)


def test_each_host_gets_what_the_first_one_asks_for_on_a_node_of_its_own():
    from jaxis.integrations.ray_arguments import ServeArguments

    options = {"num_cpus": 8, "num_gpus": 4, "accelerator_type": "H100", "resources": {"fast": 1}}
    given = ServeArguments.of(HOSTS | {"ray_actor_options": options})
    bundle = {"CPU": 8.0, "GPU": 4.0, "accelerator_type:H100": 0.001, "fast": 1}
    assert given.deployment["placement_group_bundles"] == [bundle, bundle]
    assert given.deployment["placement_group_strategy"] == "STRICT_SPREAD"
