"""Commands of processes that stand for the hosts of a group, and what the leader's prints."""

import json

import numpy as np

SERVE = ["-c", "from jaxis.cli.main import main; main()", "serve"]


def leader(scenario, model, size, port, num_hosts=2, **arguments):
    """A process that runs a scenario of `tests.engine.hosts.leader`."""
    given = [scenario, str(model), str(num_hosts), str(size), str(port), json.dumps(arguments)]
    return ["-m", "tests.engine.hosts.leader", *given]


def follower(port, *arguments, rank=1, num_hosts=2):
    """A follower as users start it."""
    place = ["--nnodes", str(num_hosts), "--node-rank", str(rank), "--master-port", str(port)]
    return [*SERVE, *arguments, *place, "--headless"]


def faulty_follower(fault, port):
    """A follower with a fault of `tests.engine.hosts.faulty_follower`."""
    return ["-m", "tests.engine.hosts.faulty_follower", fault, str(port)]


def server(model, port, http_port, *arguments):
    """The leader of two hosts as users start it."""
    ports = ["--tensor-parallel-size", "2", "--nnodes", "2", "--master-port", str(port), "--port", str(http_port)]
    sizes = ["--max-num-seqs", "4", "--kv-cache-memory", "4MiB", "--max-num-batched-tokens", "32"]
    return [*SERVE, str(model), *ports, *sizes, *arguments]


def answers_of(host):
    """What a leader's scenario found."""
    [line] = [line for line in host.output.splitlines() if line.startswith("ANSWERS ")]
    return json.loads(line.removeprefix("ANSWERS "))


def check_answers(hosts, expected):
    """All hosts end well, and the answers that the leader has printed are those of one process."""
    assert [host.wait() for host in hosts] == [0] * len(hosts), "\n".join(host.output for host in hosts)
    found = answers_of(hosts[0])
    for name in ("whole", "paged"):
        if name in expected:
            np.testing.assert_allclose(found.pop(name), expected.pop(name), rtol=1e-4, atol=1e-4)
    assert found == json.loads(json.dumps(expected))
    assert found["hit"][0]
    assert "a fault of the leader" in found["failed"]
    assert found.get("preempted", True)
