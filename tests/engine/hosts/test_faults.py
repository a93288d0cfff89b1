"""Requests, servers and processes when one of several hosts has a fault (docs/several-machines.md)."""

import os
import re
import signal
import threading
import time

import httpx
import psutil
import pytest

from tests.engine.hosts.commands import answers_of, faulty_follower, follower, leader, server
from tests.support.host_processes import free_port, host_processes
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.multi_device]
REQUEST = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0}
STALL_SECONDS = 15
# More than any of these takes where nothing else runs: other tests share the processors.
MARGIN_SECONDS = 15


class Server:
    """A server's HTTP port."""

    def __init__(self):
        self.port = free_port()

    def ask(self, **changes):
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        return httpx.post(url, json=REQUEST | changes, timeout=120)

    def health(self):
        return httpx.get(f"http://127.0.0.1:{self.port}/health", timeout=10).status_code

    def is_running(self):
        """Whether a request runs."""
        metrics = httpx.get(f"http://127.0.0.1:{self.port}/metrics", timeout=10).text
        return re.search(r"^jaxis:num_requests_running\S* [1-9]", metrics, re.MULTILINE)

    def wait_for(self, host):
        host.wait_for(f"{self.port}/v1")

    def ask_meanwhile(self, **changes):
        """A request on another thread: (the thread, what will have the response)."""
        responses = []
        thread = threading.Thread(target=lambda: responses.append(self.ask(**changes)))
        thread.start()
        return thread, responses


def seconds_since(started):
    print(f"after {time.time() - started:.2f} s")
    return time.time() - started


@pytest.mark.parametrize("size", ["2", "2x1x1"], ids=["tensor", "stages"])
@pytest.mark.parametrize("scenario", ["prefills", "decodes"])
def test_a_killed_follower_fails_the_requests_at_once(checkpoint, scenario, size):
    port = free_port()
    with host_processes([leader(scenario, checkpoint(), size, port), follower(port)]) as (first, second):
        first.wait_for("generated")
        killed = time.time()
        second.process.kill()
        first.wait_for("ANSWERS")
        # Less than a second where nothing else runs.
        [line] = [line for line in first.output.splitlines() if line.startswith("lost at ")]
        print(f"requests failed after {float(line.split()[-1]) - killed:.2f} s")
        assert float(line.split()[-1]) - killed < MARGIN_SECONDS
        errors = answers_of(first)["errors"]
        assert first.wait(60) != 0
    assert len(errors) == 2
    assert all("host 1 (" in error and "has ended" in error for error in errors)


def test_followers_end_with_a_killed_leader(checkpoint):
    port = free_port()
    with host_processes([leader("endless", checkpoint(), 2, port), follower(port)]) as (first, second):
        first.wait_for("generated")
        killed = time.time()
        first.process.kill()
        assert second.wait(30) != 0
        assert seconds_since(killed) < MARGIN_SECONDS


def test_the_failure_of_a_followers_program_is_that_of_the_requests(checkpoint):
    port = free_port()
    with host_processes([leader("endless", checkpoint(), 2, port), faulty_follower("raises", port)]) as (first, second):
        first.wait_for("ANSWERS")
        assert second.wait() == 1
        errors = answers_of(first)["errors"]
    assert all("has failed: a fault of the devices" in error and "host 1 (" in error for error in errors)
    assert not any("with details" in error for error in errors)


def test_a_follower_that_compiles_for_long_is_waited_for_and_named(checkpoint):
    port = free_port()
    with host_processes([leader("short", checkpoint(), 2, port), faulty_follower("slow", port)]) as (first, second):
        assert (first.wait(300), second.wait()) == (0, 0), first.output + second.output
        assert "that host 1 (" in first.output
        assert "is still compiling" in first.output


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


def test_a_server_comes_back_when_its_follower_does_and_ends_after_its_requests(checkpoint):
    port, api = free_port(), Server()
    with host_processes([server(checkpoint(), port, api.port), follower(port)]) as (first, second):
        api.wait_for(first)
        before = api.ask()
        assert before.status_code == 200, before.text
        second.process.kill()
        killed = time.time()
        wait_until(lambda: api.health() == 503)
        assert seconds_since(killed) < MARGIN_SECONDS
        with host_processes([follower(port)]) as [third]:
            wait_until(lambda: api.health() == 200, 120)
            assert api.ask().json()["choices"] == before.json()["choices"]
            thread, responses = api.ask_meanwhile(max_tokens=400, ignore_eos=True)
            wait_until(api.is_running)
            first.process.send_signal(signal.SIGTERM)
            assert (first.wait(), third.wait()) == (0, 0), first.output + third.output
            thread.join(10)
            assert responses[0].json()["usage"]["completion_tokens"] == 400
        assert "host 1 (" in first.output


def test_a_stopped_follower_is_named_and_the_group_ends_within_the_stall_limit(checkpoint):
    port, api = free_port(), Server()
    command = server(checkpoint(), port, api.port, "--stall-timeout", str(STALL_SECONDS))
    with host_processes([command, follower(port)]) as (first, second):
        api.wait_for(first)
        assert api.ask().status_code == 200
        thread, responses = api.ask_meanwhile(max_tokens=400, ignore_eos=True)
        second.process.send_signal(signal.SIGSTOP)
        stopped = time.time()
        wait_until(lambda: api.health() == 503)
        assert 8 < seconds_since(stopped) < 10 + MARGIN_SECONDS
        first.wait_for("has given no sign of life for 1")
        thread.join(STALL_SECONDS + MARGIN_SECONDS)
        assert seconds_since(stopped) < STALL_SECONDS + MARGIN_SECONDS
        assert responses[0].status_code == 503
        assert "host 1 (" in responses[0].text
        assert f"no sign of life for {STALL_SECONDS} s: the group of 2 hosts cannot go on" in responses[0].text
        os.kill(second.process.pid, signal.SIGCONT)
        assert second.wait(30) != 0


def test_a_step_that_takes_longer_than_the_stall_limit_ends_the_group(checkpoint):
    """A host whose devices wait forever gives signs of life all the same."""
    port, api = free_port(), Server()
    command = server(checkpoint(), port, api.port, "--stall-timeout", str(STALL_SECONDS))
    with host_processes([command, faulty_follower("stuck", port)]) as (first, second):
        api.wait_for(first)
        started = time.time()
        response = api.ask(max_tokens=40, ignore_eos=True)
        assert seconds_since(started) < STALL_SECONDS + 2 * MARGIN_SECONDS
        assert response.status_code == 503
        assert f"a step has taken more than {STALL_SECONDS} s; host 1 (" in response.text
        assert ") has made " in response.text
        assert second.wait(30) != 0


def test_no_process_is_left_of_a_killed_server(checkpoint):
    port, api = free_port(), Server()
    with host_processes([server(checkpoint(), port, api.port), follower(port)]) as (first, second):
        api.wait_for(first)
        assert api.ask().status_code == 200
        children = psutil.Process(first.process.pid).children(recursive=True)
        assert children
        killed = time.time()
        first.process.kill()
        assert second.wait(30) == 0
        _, alive = psutil.wait_procs(children, timeout=30)
        assert not alive
        assert seconds_since(killed) < MARGIN_SECONDS
