"""Start of a group of hosts: they find each other, and check that they agree before anything is loaded.

The leader listens at the address that all hosts were given. Each follower connects, and sends its rank and its software
versions. JAX's processes are initialized only once all hosts have connected and agree: JAX itself ends a process
without a message if another one is missing.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jaxis.engine.hosts import messages
from jaxis.errors import ConfigError, EngineError
from jaxis.host.channel import Channel, ChannelClosedError
from jaxis.parallel import distributed
from jaxis.version import __version__

HELLO_SECONDS = 5.0  # a connection that has not sent `Hello` by then is closed
RETRY_SECONDS = 0.2
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HostPlace:
    """Configuration of this host within its group.

    Attributes:
      num_hosts: Size of the group.
      rank: Rank of this host; 0 is the leader.
      address: Address at which all hosts reach the leader.
      port: Port of the leader.
      timeout_seconds: Time that hosts wait for each other at the start.
      has_jax: True if JAX's processes are initialized already.
    """

    num_hosts: int
    rank: int
    address: str
    port: int
    timeout_seconds: int
    has_jax: bool = False


@dataclass(frozen=True)
class Follower:
    """The leader's view of another host.

    Attributes:
      rank: Rank of the host.
      name: Host name of the machine.
      channel: Connection to it.
    """

    rank: int
    name: str
    channel: Channel[messages.Report]

    def __str__(self) -> str:
        return f"host {self.rank} ({self.name})"


def software() -> dict[str, str]:
    """Versions and settings that must be equal on all hosts, so that all compile the same programs."""
    facts = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "numpy")}
    variables = {name: os.environ.get(name, "") for name in ("XLA_FLAGS", "JAXIS_CPU_ISA", "JAX_ENABLE_X64")}
    return {"jaxis": __version__, **facts, "Python": platform.python_version(), **variables}


def check_agreement(ours: Mapping[str, str], theirs: Mapping[str, str], host: object) -> None:
    """Checks that the facts of two hosts are equal.

    Raises:
      ConfigError: A fact differs; the error names both values.
    """
    for name in sorted(ours.keys() | theirs.keys()):
        mine, other = ours.get(name), theirs.get(name)
        if mine != other:
            raise ConfigError(f"{name} is {other!r} on {host}, and {mine!r} on host 0: all hosts need the same")


def gather(place: HostPlace) -> list[Follower]:
    """Waits for the followers and initializes JAX's processes, unless they are. The leader calls it.

    Raises:
      ConfigError: The address is not this machine's, or a follower runs other versions.
      EngineError: A follower did not connect in time.
    """
    followers: dict[int, Follower] = {}
    try:
        with _listen(place) as listener:
            deadline = time.monotonic() + place.timeout_seconds
            while len(followers) < place.num_hosts - 1:
                listener.settimeout(max(0.01, deadline - time.monotonic()))
                try:
                    connection, (address, *_) = listener.accept()
                except TimeoutError:
                    raise EngineError(_missing(place, followers)) from None
                follower = _greet(connection, address, place, followers)
                if follower is not None:
                    followers[follower.rank] = follower
                    _logger.info("%s has come", follower)
        coordinator = "" if place.has_jax else f"{place.address}:{distributed.free_port(place.address)}"
        for follower in followers.values():
            follower.channel.send(messages.JoinGroup(coordinator))
    except ChannelClosedError as error:
        raise EngineError(f"a host has ended before the group began: {error}") from None
    except BaseException as error:
        refuse(followers.values(), str(error))
        raise
    if not place.has_jax:
        distributed.initialize(coordinator, place.num_hosts, 0, place.timeout_seconds)
    return [followers[rank] for rank in sorted(followers)]


def refuse(followers: Iterable[Follower], reason: str) -> None:
    """Tells followers that the group does not start."""
    for follower in followers:
        try:
            follower.channel.send(messages.GroupRefused(reason))
        except ChannelClosedError:
            continue
        follower.channel.finish()


def join(place: HostPlace) -> Channel[messages.Call | messages.Setup]:
    """Connects to the leader and initializes JAX's processes, unless they are. A follower calls it.

    Raises:
      ConfigError: The leader refuses the group.
      EngineError: The leader did not answer in time, or has ended.
    """
    channel = Channel(_connect(place), messages.ORDERS, messages.MAX_BYTES)
    name = socket.gethostname()
    try:
        channel.send(messages.Hello(place.rank, place.num_hosts, name, software()))
        order = channel.receive()
    except ChannelClosedError:
        raise EngineError(f"the leader at {place.address}:{place.port} has ended") from None
    if isinstance(order, messages.GroupRefused):
        raise ConfigError(order.reason)
    if not isinstance(order, messages.JoinGroup):
        raise EngineError(f"the leader at {place.address}:{place.port} sent {type(order).__name__} first")
    if not place.has_jax:
        distributed.initialize(order.coordinator, place.num_hosts, place.rank, place.timeout_seconds)
    return channel


def _listen(place: HostPlace) -> socket.socket:
    try:
        return socket.create_server((place.address, place.port), backlog=place.num_hosts)
    except OSError as error:
        raise ConfigError(
            f"master_addr={place.address!r} with master_port={place.port} cannot be listened on ({error.strerror}): "
            "give an address of this host that the others reach, and a free port"
        ) from None


def _greet(
    connection: socket.socket, address: str, place: HostPlace, followers: Mapping[int, Follower]
) -> Follower | None:
    """Admits a new connection as a follower; returns None if it is not a host of this group."""
    channel = Channel(connection, messages.REPORTS, messages.MAX_HELLO_BYTES)
    try:
        hello = channel.receive(HELLO_SECONDS)
    except (TimeoutError, ChannelClosedError) as error:
        _logger.warning("a connection from %s was closed: it is no host of this group (%s)", address, error)
        channel.close()
        return None
    if not isinstance(hello, messages.Hello):
        _logger.warning("a connection from %s was closed: it began with %s", address, type(hello).__name__)
        channel.close()
        return None
    follower = Follower(hello.rank, hello.name, channel)
    try:
        _check(hello, follower, place, followers)
    except ConfigError as error:
        refuse([follower], str(error))
        raise
    channel.admit(messages.MAX_BYTES)
    return follower


def _check(hello: messages.Hello, follower: Follower, place: HostPlace, followers: Mapping[int, Follower]) -> None:
    if hello.num_hosts != place.num_hosts:
        raise ConfigError(f"nnodes is {hello.num_hosts} on {follower}, and {place.num_hosts} on host 0")
    if not 1 <= hello.rank < place.num_hosts:
        raise ConfigError(f"node_rank={hello.rank} of {hello.name} is not one of 1 to {place.num_hosts - 1}")
    if (other := followers.get(hello.rank)) is not None:
        raise ConfigError(f"node_rank={hello.rank} is that of {other.name} and of {hello.name}: give each its own")
    check_agreement(software(), hello.facts, follower)


def _missing(place: HostPlace, followers: Mapping[int, Follower]) -> str:
    missing = [str(rank) for rank in range(1, place.num_hosts) if rank not in followers]
    came = ", ".join(str(follower) for follower in followers.values()) or "none"
    return (
        f"no word from node_rank {', '.join(missing)} within {place.timeout_seconds} s (there: {came}): start each "
        f"with --nnodes {place.num_hosts} --node-rank R --master-addr {place.address} --master-port {place.port}"
    )


def _connect(place: HostPlace) -> socket.socket:
    deadline = time.monotonic() + place.timeout_seconds
    while True:
        try:
            return socket.create_connection((place.address, place.port), timeout=HELLO_SECONDS)
        except OSError as error:
            if time.monotonic() > deadline:
                raise EngineError(
                    f"there is no leader at {place.address}:{place.port} after {place.timeout_seconds} s "
                    f"({error.strerror or error})"
                ) from None
        time.sleep(RETRY_SECONDS)
