"""Several hosts that share a training: they check that they agree, and none waits for one that has ended."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import jax

from jaxis.engine.hosts import messages
from jaxis.engine.hosts.followers import LOST_SECONDS, Followers, end_process
from jaxis.engine.hosts.meeting import HostPlace, gather, join
from jaxis.errors import ConfigError, EngineError, JaxisError
from jaxis.host.channel import Channel, ChannelClosedError
from jaxis.parallel import distributed

_HEARTBEAT_SECONDS = 0.5
_NOTICE_SECONDS = 10.0  # after an error of the devices, for the news of a host that has ended
_logger = logging.getLogger(__name__)


class Hosts:
    """The hosts of a training, as one of them sees them.

    Attributes:
      is_first: True on host 0, which writes the logs and the model.
    """

    is_first: bool

    def agree(self, facts: Mapping[str, str]) -> None:
        """Checks that a training is the same on all hosts, and from then on ends this process if one is lost.

        Raises ConfigError if a fact differs, and EngineError if another host cannot begin.
        """
        raise NotImplementedError

    def finish(self) -> None:
        """Waits until all hosts have finished, and leaves the group."""
        raise NotImplementedError

    def fail(self, error: BaseException) -> None:
        """Tells the other hosts of an error that ends this process."""
        raise NotImplementedError


class _First(Hosts):
    is_first = True

    def __init__(self, place: HostPlace) -> None:
        self._followers = Followers(gather(place))
        self._is_watching = False

    def agree(self, facts: Mapping[str, str]) -> None:
        self._followers.check_facts(dict(facts))
        self._followers.when_lost(end_process, LOST_SECONDS)
        self._followers.send(messages.Alive())
        self._watch()
        threading.Thread(target=self._beat, name="jaxis-heartbeat", daemon=True).start()

    def _beat(self) -> None:
        while True:
            try:
                self._followers.send(messages.Alive())
            except EngineError:
                return
            time.sleep(_HEARTBEAT_SECONDS)

    def finish(self) -> None:
        self._followers.end()

    def fail(self, error: BaseException) -> None:
        if not isinstance(error, JaxisError):
            self._followers.wait_until_lost(_NOTICE_SECONDS)
        self._followers.refuse(f"host 0: {_line(error)}")
        self._watch()
        self._followers.wait_until_ended()  # JAX ends them without a line if this process goes first

    def _watch(self) -> None:
        if not self._is_watching:
            self._is_watching = True
            self._followers.watch()


class _Other(Hosts):
    is_first = False

    def __init__(self, place: HostPlace) -> None:
        self._channel: Channel[messages.Call | messages.Setup] = join(place)
        self._is_over = threading.Event()

    def agree(self, facts: Mapping[str, str]) -> None:
        try:
            self._channel.send(messages.ModelFound(dict(facts)))
            order = self._channel.receive()
        except ChannelClosedError:
            raise EngineError("host 0 has ended") from None
        if isinstance(order, messages.GroupRefused):
            raise ConfigError(order.reason)
        threading.Thread(target=self._follow, name="jaxis-heartbeat", daemon=True).start()

    def _follow(self) -> None:
        last_word = time.monotonic()
        try:
            while True:
                self._channel.send(messages.CallsMade(0))
                try:
                    order = self._channel.receive(_HEARTBEAT_SECONDS)
                except TimeoutError:
                    if (silence := time.monotonic() - last_word) > LOST_SECONDS:
                        end_process(EngineError(f"host 0 has given no sign of life for {silence:.0f} s"))
                    continue
                last_word = time.monotonic()
                if isinstance(order, messages.GroupRefused):
                    end_process(EngineError(order.reason))
                if isinstance(order, messages.Close):
                    self._is_over.set()
                    return
        except ChannelClosedError:
            end_process(EngineError("host 0 has ended"))

    def finish(self) -> None:
        self._is_over.wait()
        distributed.leave()
        self._channel.close()

    def fail(self, error: BaseException) -> None:
        if not isinstance(error, JaxisError):
            time.sleep(_NOTICE_SECONDS)  # the thread ends this process as soon as it knows why
        self._channel.send(messages.HostFailed(type(error).__name__, _line(error)))


@contextmanager
def joined(place: HostPlace) -> Iterator[Hosts]:
    """A context in which this process is one of the hosts of a training.

    An error ends the process at once, with one line and exit code 1, since JAX would wait for the other hosts. So does
    the loss of another host.

    Raises:
      ConfigError: The address is not this machine's, or hosts differ in their versions.
      EngineError: Hosts did not meet in time.
    """
    hosts = _First(place) if place.rank == 0 else _Other(place)
    try:
        yield hosts
    except BaseException as error:
        _logger.debug("this host has failed", exc_info=error)
        try:
            hosts.fail(error)
        except ChannelClosedError:
            _logger.debug("the other hosts have ended")
        end_process(EngineError(_line(error)))
    hosts.finish()


def place_by_cluster(timeout_seconds: int) -> HostPlace:
    """Returns this process's place among those that a cluster started; JAX's processes are initialized.

    Raises ConfigError if no cluster started it, and EngineError if they did not meet in time.
    """
    distributed.initialize_by_cluster(timeout_seconds)
    address, port = "", 0
    if jax.process_index() == 0:
        address = socket.gethostbyname(socket.gethostname())
        port = distributed.free_port(address)
    address, _, port = distributed.text_of_first(f"{address}:{port}").rpartition(":")
    return HostPlace(jax.process_count(), jax.process_index(), address, int(port), timeout_seconds, has_jax=True)


def _line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
