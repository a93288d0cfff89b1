"""How hosts find each other and agree, up to where JAX's processes would meet."""

import socket
import threading

import pytest

from jaxis.engine.hosts import meeting, messages
from jaxis.engine.hosts.meeting import HostPlace, gather, join, software
from jaxis.errors import ConfigError, EngineError
from jaxis.host.channel import Channel
from tests.support.host_processes import free_port


@pytest.fixture
def place():
    return HostPlace(2, 0, "127.0.0.1", free_port(), 20)


def connect(place):
    while True:
        try:
            return socket.create_connection((place.address, place.port), timeout=20)
        except ConnectionRefusedError:
            continue


def in_thread(function):
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    return thread, results


def say(place, hello, answers):
    channel = Channel(connect(place), messages.ORDERS, messages.MAX_BYTES)
    channel.send(hello)
    answers.append(channel.receive())


@pytest.mark.parametrize(
    ("hello", "message"),
    [
        (messages.Hello(1, 3, "b", {}), r"nnodes is 3 on host 1 \(b\), and 2 on host 0"),
        (messages.Hello(2, 2, "b", {}), "node_rank=2 of b is not one of 1 to 1"),
        (messages.Hello(1, 2, "b", software() | {"jax": "0.1"}), r"jax is '0.1' on host 1 \(b\), and '.*' on host 0"),
        (messages.Hello(1, 2, "b", {}), "is None on host 1"),
    ],
)
def test_hosts_that_differ_are_refused_with_both_values(place, hello, message):
    answers = []
    thread, _ = in_thread(lambda: say(place, hello, answers))
    with pytest.raises(ConfigError, match=message) as error:
        gather(place)
    thread.join(20)
    [refused] = answers
    assert refused.reason == str(error.value)


def test_a_missing_host_is_named(place):
    with pytest.raises(
        EngineError, match=r"no word from node_rank 1 within 1 s \(there: none\): start each with --nnodes"
    ):
        gather(HostPlace(2, 0, place.address, place.port, 1))


def test_a_missing_leader_is_named(place):
    with pytest.raises(EngineError, match=f"there is no leader at 127.0.0.1:{place.port} after 0 s"):
        join(HostPlace(2, 1, place.address, place.port, 0))


def test_an_address_of_another_machine_is_refused(place):
    with pytest.raises(ConfigError, match="cannot be listened on"):
        gather(HostPlace(2, 0, "192.0.2.1", place.port, 1))


def test_strangers_are_sent_away(place, monkeypatch, caplog):
    """Silent ones, those that speak another protocol, and those whose first message has another type."""
    monkeypatch.setattr(meeting, "HELLO_SECONDS", 0.2)

    def strangers():
        received = []
        for data in (b"GET / HTTP/1.1\r\n\r\n", b"\x05" + b"\0" * 7 + b"hello", b""):
            with connect(place) as connection:
                connection.sendall(data)
                received.append(connection.recv(1))
        return received

    thread, received = in_thread(strangers)
    with pytest.raises(EngineError, match="no word from node_rank 1"):
        gather(HostPlace(2, 0, place.address, place.port, 2))
    thread.join(20)
    assert received == [[b""] * 3]
    assert caplog.text.count("it is no host of this group") == 3
