"""One model on two hosts, each a process here: the same answers as on one, and what becomes of requests in a fault."""

import json
import signal
import time

import httpx
import numpy as np
import pytest

from tests.engine.hosts.leader import answers_of_every_kind, short_answers, start
from tests.engine.test_expert_parallel import checkpoint as checkpoint_of_experts
from tests.support.expert_parallel import results
from tests.support.host_processes import free_port, host_processes
from tests.support.waiting import wait_until

SERVE = ["-c", "from jaxis.cli.main import main; main()", "serve"]


def leader(scenario, model, size, port):
    return ["-m", "tests.engine.hosts.leader", scenario, str(model), "2", str(size), str(port)]


def follower(port, *arguments):
    return [*SERVE, *arguments, "--nnodes", "2", "--node-rank", "1", "--master-port", str(port), "--headless"]


def answers_of(host):
    [line] = [line for line in host.output.splitlines() if line.startswith("ANSWERS ")]
    return json.loads(line.removeprefix("ANSWERS "))


@pytest.mark.multi_device
@pytest.mark.parametrize(
    ("scenario", "num_devices"),
    [("short", 1), pytest.param("all", 1, marks=pytest.mark.slow), pytest.param("all", 2, marks=pytest.mark.slow)],
)
def test_two_hosts_answer_as_one_does(checkpoint, scenario, num_devices):
    port, size = free_port(), 2 * num_devices
    with host_processes([leader(scenario, checkpoint(), size, port), follower(port)], num_devices=num_devices) as hosts:
        with start(str(checkpoint()), 1, 1, port) as llm:
            expected = {"short": short_answers, "all": answers_of_every_kind}[scenario](llm)
        assert [host.wait() for host in hosts] == [0, 0], "\n".join(host.output for host in hosts)
        found = answers_of(hosts[0])
    for name in ("whole", "paged"):
        if name in expected:
            np.testing.assert_allclose(found.pop(name), expected.pop(name), rtol=1e-4, atol=1e-4)
    assert found == json.loads(json.dumps(expected))
    assert found["hit"][0]
    assert "a fault of the leader" in found["failed"]
    assert found.get("preempted", True)


@pytest.mark.multi_device
@pytest.mark.slow
def test_experts_on_the_devices_of_two_hosts():
    """Each host converts and keeps its own only."""
    folder, port = str(checkpoint_of_experts("GPT-OSS")), free_port()
    command = ["-m", "tests.engine.hosts.expert_leader", folder, "4", str(port)]
    with host_processes([command, follower(port)], num_devices=2) as hosts:
        logits, tokens, _ = results(folder)
        assert [host.wait() for host in hosts] == [0, 0], "\n".join(host.output for host in hosts)
        found = answers_of(hosts[0])
    assert found["tokens"] == tokens
    np.testing.assert_allclose(found["logits"], logits, rtol=0, atol=1e-4 * np.abs(logits).max())
    assert found["shares"] == [1 / 4]
    assert found["experts"] == [0, 1, 2, 3]


@pytest.mark.multi_device
@pytest.mark.slow
@pytest.mark.parametrize(("size", "num_devices"), [("2x1", 1), ("2x2", 2), ("4x1", 2)])
def test_data_ranks_on_two_hosts_answer_as_one_device_does(checkpoint, size, num_devices):
    port = free_port()
    with host_processes([leader("all", checkpoint(), size, port), follower(port)], num_devices=num_devices) as hosts:
        with start(str(checkpoint()), 1, 1, port) as llm:
            expected = answers_of_every_kind(llm)
        assert [host.wait() for host in hosts] == [0, 0], "\n".join(host.output for host in hosts)
        found = answers_of(hosts[0])
    for name in ("whole", "paged"):
        np.testing.assert_allclose(found.pop(name), expected.pop(name), rtol=1e-4, atol=1e-4)
    del found["preempted"], expected["preempted"]  # each rank has as many blocks as the one device
    assert found == json.loads(json.dumps(expected))
    assert found["hit"][0]


@pytest.mark.multi_device
@pytest.mark.slow
def test_a_killed_follower_fails_the_requests_at_once(checkpoint):
    port = free_port()
    with host_processes([leader("endless", checkpoint(), 2, port), follower(port)]) as (first, second):
        first.wait_for("generated")
        killed = time.time()
        second.process.kill()
        first.wait_for("ANSWERS")
        # Less than a second where nothing else runs.
        [line] = [line for line in first.output.splitlines() if line.startswith("lost at ")]
        assert float(line.split()[-1]) - killed < 15
        errors = answers_of(first)["errors"]
    assert len(errors) == 2
    assert all("host 1 (" in error and "has ended" in error for error in errors)


@pytest.mark.multi_device
@pytest.mark.slow
def test_followers_end_with_a_killed_leader(checkpoint):
    port = free_port()
    with host_processes([leader("endless", checkpoint(), 2, port), follower(port)]) as (first, second):
        first.wait_for("generated")
        first.process.kill()
        assert second.wait(30) != 0


@pytest.mark.multi_device
@pytest.mark.slow
def test_a_follower_that_is_asked_to_end_waits_for_its_leader(checkpoint):
    port = free_port()
    with host_processes([leader("endless", checkpoint(), 2, port), follower(port)]) as (first, second):
        first.wait_for("generated")
        second.process.send_signal(signal.SIGTERM)
        second.wait_for("ends when its leader does")
        assert first.process.poll() is None
        second.process.send_signal(signal.SIGTERM)
        assert second.wait(30) == 1
        first.wait_for("ANSWERS")


@pytest.mark.multi_device
@pytest.mark.slow
def test_hosts_with_different_files_do_not_start(checkpoint):
    port = free_port()
    with host_processes([leader("short", checkpoint(), 2, port), follower(port, str(checkpoint("llama")))]) as (
        first,
        second,
    ):
        assert first.wait() != 0
        assert second.wait() == 1
        assert "the digest of the model's files is '" in first.output
        assert "the digest of the model's files is '" in second.output


@pytest.mark.multi_device
@pytest.mark.slow
def test_a_server_on_two_hosts_comes_back_when_its_follower_does(checkpoint):
    port, http_port = free_port(), free_port()
    arguments = ["--tensor-parallel-size", "2", "--nnodes", "2", "--master-port", str(port), "--port", str(http_port)]
    sizes = ["--max-num-seqs", "4", "--kv-cache-memory", "4MiB", "--max-num-batched-tokens", "32"]
    body = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0}
    url = f"http://127.0.0.1:{http_port}"

    def ask():
        return httpx.post(f"{url}/v1/completions", json=body, timeout=120)

    commands = [[*SERVE, str(checkpoint()), *arguments, *sizes], follower(port)]
    with host_processes(commands) as (first, second):
        first.wait_for(f"{http_port}/v1")
        before = ask()
        assert before.status_code == 200, before.text
        second.process.kill()
        wait_until(lambda: httpx.get(f"{url}/health").status_code == 503)
        with host_processes([follower(port)]) as [third]:
            wait_until(lambda: httpx.get(f"{url}/health").status_code == 200, 120)
            assert ask().json()["choices"] == before.json()["choices"]
            first.process.send_signal(signal.SIGTERM)
            assert (first.wait(), third.wait()) == (0, 0), first.output + third.output
        assert "host 1 (" in first.output
